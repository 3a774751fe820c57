#include "kernels/moe/expert_engine.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <stdexcept>
#include <thread>

#include "kernels/gemm/registry.h"
#include "kernels/moe/kernel_plan.h"

namespace moebius {
namespace {

constexpr size_t kCalibrationExperts = 64;
// How long a call waits for a repair, and how often it checks that the repair is still expected.
constexpr std::chrono::seconds kLongestRepair{60};
constexpr std::chrono::milliseconds kRepairLook{50};

// A level below this machine's highest was asked for, by option or by MOEBIUS_ISA: kernels of just that level then.
PlanOptions plan_options(const EngineOptions& options, Isa isa) {
  const bool exact = options.isa != "auto" || isa != supported_isas().back();
  return {isa, exact, options.kernel};
}

}  // namespace

ExpertEngine::ExpertEngine(const EngineOptions& options)
    : options_(checked_options(options)),
      isa_(resolve_isa(options.isa)),
      store_(options_),
      pool_(options.num_threads, options.cpus),
      plan_(store_.layouts(), plan_options(options_, isa_)),
      moe_(options_, vector_kernels(isa_), store_, plan_, pool_),
      stats_(options.num_layers, options.num_experts) {
  store_.on_damage([this](uint32_t layer, uint32_t expert) {
    ++stats_.damaged_experts;
    repairs_.found({layer, expert});
  });
  if (ColdExperts* const cold = store_.cold()) cold->take_memory(pool_);
}

void ExpertEngine::reserve(uint32_t layer, uint32_t count) {
  check_layer(layer);
  store_.reserve(layer, count);
}

PackError ExpertEngine::load_expert(uint32_t layer, uint32_t expert, const ExpertSource& source) {
  check_layer(layer);
  return store_.load(layer, local_expert(expert), source, pool_);
}

void ExpertEngine::fill(uint32_t layer, const ExpertStore::Writer& write) {
  check_layer(layer);
  store_.fill(layer, write, pool_);
}

const std::byte* ExpertEngine::packed_expert(uint32_t layer, uint32_t expert) const {
  check_layer(layer);
  const uint32_t local = local_expert(expert);
  const bool is_there = store_.cold() == nullptr || store_.cold()->is_read(layer, local);
  const std::byte* packed = is_there ? store_.find(layer, local) : nullptr;
  if (packed != nullptr) return packed;
  throw std::invalid_argument("layer " + std::to_string(layer) + ": expert " + std::to_string(expert) +
                              " is not loaded");
}

void ExpertEngine::calibrate() {
  std::lock_guard<std::mutex> lock(forward_mutex_);
  for (uint32_t index = 0; index < store_.layouts().size(); ++index) {
    const std::vector<const std::byte*> experts = loaded_experts(index);
    if (!experts.empty()) calibrate_plan(plan_, index, store_.layouts()[index], experts, pool_);
  }
}

// Up to kCalibrationExperts of the first layer with this layout that has any.
std::vector<const std::byte*> ExpertEngine::loaded_experts(uint32_t layout_index) const {
  std::vector<const std::byte*> experts;
  for (uint32_t layer = 0; layer < store_.num_layers() && experts.empty(); ++layer) {
    if (store_.layout_index(layer) != layout_index) continue;
    for (uint32_t expert = 0; expert < store_.num_experts() && experts.size() < kCalibrationExperts; ++expert) {
      if (store_.cold() != nullptr && !store_.cold()->is_read(layer, expert)) continue;
      if (const std::byte* packed = store_.find(layer, expert)) experts.push_back(packed);
    }
  }
  return experts;
}

KernelPlan ExpertEngine::plan() const {
  std::lock_guard<std::mutex> lock(forward_mutex_);
  return plan_;
}

bool ExpertEngine::restore_plan(const std::vector<std::pair<std::string, double>>& choices) {
  std::lock_guard<std::mutex> lock(forward_mutex_);
  KernelPlan plan = plan_;
  if (!plan.restore(choices)) return false;
  plan_ = plan;
  return true;
}

void ExpertEngine::finish_load(const std::string& load_record) {
  store_.finish(load_record);
}

bool ExpertEngine::verify_expert(uint32_t layer, uint32_t expert) {
  check_layer(layer);
  const uint32_t local = local_expert(expert);
  bool whole = true;
  // A thread of its own, because only root may raise a lowest priority again; the caller waits without locks.
  std::thread([&] {
    const sched_param lowest{};
    sched_setscheduler(0, SCHED_IDLE, &lowest);  // of this thread; refused, it computes at normal priority
    whole = verify(layer, local);
  }).join();
  stats_.verified_bytes += store_.layout(layer).expert_bytes;
  return whole;
}

bool ExpertEngine::verify(uint32_t layer, uint32_t local) {
  const Verdict verdict = store_.verify(layer, local);
  if (verdict == Verdict::kFound) {
    ++stats_.damaged_experts;
    repairs_.found({layer, local});
  }
  return verdict == Verdict::kWhole;
}

std::optional<std::pair<uint32_t, uint32_t>> ExpertEngine::wait_for_damage(std::chrono::nanoseconds longest) {
  const std::optional<Repairs::Expert> found = repairs_.wait_for_found(longest);
  if (!found) return std::nullopt;
  return std::pair(found->layer, options_.expert_begin + found->expert);
}

bool ExpertEngine::repair_expert(uint32_t layer, uint32_t expert, const ExpertSource& source) {
  check_layer(layer);
  const uint32_t local = local_expert(expert);
  if (!store_.holds(layer, local) || store_.trust(layer, local) != Trust::kDamaged) {
    throw std::invalid_argument(name_of(layer, local) + " is not damaged");
  }
  const AlignedBytes packed = store_.pack_again(layer, local, source);
  if (!packed) return false;
  {
    std::lock_guard<std::mutex> lock(forward_mutex_);
    if (!store_.replace(layer, local, packed)) {
      throw DamagedExpert(name_of(layer, local) + ": its memory does not keep what is written to it");
    }
  }
  ++stats_.repaired_experts;
  repairs_.repaired({layer, local});
  return true;
}

void ExpertEngine::give_up_expert(uint32_t layer, uint32_t expert, const std::string& reason) {
  check_layer(layer);
  repairs_.given_up({layer, local_expert(expert)}, reason);
}

const weights::ExpertRecord* ExpertEngine::segment_record(uint32_t layer, uint32_t expert) const {
  check_layer(layer);
  return store_.record(layer, local_expert(expert));
}

void ExpertEngine::expect_pauses(std::chrono::nanoseconds longest) {
  pool_.set_spin(ThreadPool::kDefaultSpin);
  // Not at all by default: spinning would cost the cgroup's quota.
  if (pool_.spin().count() > 0 && longest > pool_.spin()) pool_.set_spin(longest);
}

void ExpertEngine::forward(const ExpertRequest& request, float* output) {
  check_request(request, output);
  std::unique_lock<std::mutex> lock(forward_mutex_);
  const auto start = std::chrono::steady_clock::now();
  TaskTrace* const trace = trace_.is_on() ? &trace_ : nullptr;
  {
    // Recorded for a worker beyond the pool's: it contains the tasks of the caller's own thread.
    const TaskScope scope(trace, TaskKind::kCall, pool_.size(), request.layer, -1, request.rows);
    count(request, compute(request, output, lock));
  }
  const auto busy = std::chrono::steady_clock::now() - start;
  const auto nanoseconds = static_cast<uint64_t>(std::chrono::nanoseconds(busy).count());
  stats_.busy_nanoseconds += nanoseconds;
  stats_.layer_busy_nanoseconds[request.layer] += nanoseconds;
}

NonfiniteCounts ExpertEngine::compute(const ExpertRequest& request, float* output,
                                      std::unique_lock<std::mutex>& lock) {
  const uint32_t layer = request.layer;
  const auto since = std::chrono::steady_clock::now();
  while (true) {
    // Again after a wait, in which others may have computed.
    groups_.group(request.topk_ids, request.topk_weights, request.rows, request.top_k, options_.expert_begin,
                  options_.num_experts);
    check_loaded(layer);
    if (!store_.is_trusted()) verify_chosen(layer, false);
    NonfiniteCounts nonfinite;
    if (damaged_group(layer) == nullptr) {
      if (request.rows == 0) return {};
      nonfinite = run(request, output);
      if (nonfinite.outputs != 0 && nonfinite.inputs == 0) verify_chosen(layer, true);
    }
    // Another thread may have found one while this one computed.
    const RowGroups::Group* const damaged = damaged_group(layer);
    if (damaged == nullptr) return nonfinite;
    const uint32_t local = damaged->expert;
    lock.unlock();
    wait_for_repair(layer, local, since);
    lock.lock();
  }
}

NonfiniteCounts ExpertEngine::run(const ExpertRequest& request, float* output) {
  ColdExperts* const cold = store_.cold();
  if (cold != nullptr) {
    const uint32_t most = cold->most_together(request.layer);
    if (groups_.groups.size() > most) return run_in_turns(request, output, most);
    cold->bring(request.layer, groups_.groups, true);
  }
  return moe_.run(request, groups_, output, trace_.is_on() ? &trace_ : nullptr);
}

// Ascending experts, as many at a time as leave room for the next ones, which are read meanwhile.
NonfiniteCounts ExpertEngine::run_in_turns(const ExpertRequest& request, float* output, uint32_t most) {
  ColdExperts& cold = *store_.cold();
  const std::span<const RowGroups::Group> groups = groups_.groups;
  const size_t step = std::max(1u, most / 2);
  const auto turn_at = [&](size_t first) { return groups.subspan(first, std::min(step, groups.size() - first)); };
  NonfiniteCounts result;
  cold.bring(request.layer, turn_at(0), true);
  for (size_t first = 0; first < groups.size(); first += step) {
    if (first + step < groups.size()) cold.bring(request.layer, turn_at(first + step), false);
    const std::span<const RowGroups::Group> turn = turn_at(first);
    const uint32_t begin = turn.front().expert;
    turn_.group(request.topk_ids, request.topk_weights, request.rows, request.top_k, options_.expert_begin + begin,
                turn.back().expert - begin + 1);
    for (RowGroups::Group& group : turn_.groups) group.expert += begin;
    // Each run looks at all inputs, and at the sums so far.
    result = moe_.run(request, turn_, output, trace_.is_on() ? &trace_ : nullptr, first > 0);
  }
  return result;
}

// Verifies all chosen experts, or those not compared since a predecessor packed them; on all threads.
void ExpertEngine::verify_chosen(uint32_t layer, bool all) {
  std::vector<uint32_t> wanted;
  for (const RowGroups::Group& group : groups_.groups) {
    if (all || store_.trust(layer, group.expert) == Trust::kUnchecked) wanted.push_back(group.expert);
  }
  pool_.parallel_for(static_cast<uint32_t>(wanted.size()), [&](uint32_t task, uint32_t) { verify(layer, wanted[task]); });
}

const RowGroups::Group* ExpertEngine::damaged_group(uint32_t layer) const {
  if (store_.is_trusted()) return nullptr;
  for (const RowGroups::Group& group : groups_.groups) {
    if (store_.trust(layer, group.expert) == Trust::kDamaged) return &group;
  }
  return nullptr;
}

void ExpertEngine::wait_for_repair(uint32_t layer, uint32_t local, std::chrono::steady_clock::time_point since) {
  std::string reason = repairs_.reason({layer, local});
  if (reason.empty() && !repairs_.expected()) reason = "its checksum differs";
  if (reason.empty() && std::chrono::steady_clock::now() - since > kLongestRepair) {
    reason = "it was not repacked within " + std::to_string(kLongestRepair.count()) + " s";
  }
  const char* const where = store_.cold() == nullptr ? " is damaged in memory: " : " is damaged on disk or in memory: ";
  if (!reason.empty()) throw DamagedExpert(name_of(layer, local) + where + reason);
  repairs_.wait_for_change(kRepairLook);
  pool_.parallel_for(1, [](uint32_t, uint32_t) {});  // counts as progress, see count_progress_in()
}

std::string ExpertEngine::name_of(uint32_t layer, uint32_t local) const {
  return "layer " + std::to_string(layer) + ": expert " + std::to_string(options_.expert_begin + local);
}

void ExpertEngine::start_trace(size_t most) {
  std::lock_guard<std::mutex> lock(forward_mutex_);
  if (trace_.is_on()) throw std::invalid_argument("this engine is traced already");
  trace_.start(pool_.size() + 1, most);
}

std::pair<std::vector<TaskSpan>, uint64_t> ExpertEngine::stop_trace() {
  std::lock_guard<std::mutex> lock(forward_mutex_);
  return trace_.stop();
}

void ExpertEngine::check_layer(uint32_t layer) const {
  if (layer < options_.num_layers) return;
  throw std::invalid_argument("layer " + std::to_string(layer) + " does not exist; allowed: 0 to " +
                              std::to_string(options_.num_layers - 1));
}

uint32_t ExpertEngine::local_expert(uint32_t expert) const {
  const uint32_t end = options_.expert_begin + options_.num_experts;
  if (expert >= options_.expert_begin && expert < end) return expert - options_.expert_begin;
  throw std::invalid_argument("expert " + std::to_string(expert) + " is not held here; allowed: " +
                              std::to_string(options_.expert_begin) + " to " + std::to_string(end - 1));
}

void ExpertEngine::check_request(const ExpertRequest& request, const float* output) const {
  check_layer(request.layer);
  if (request.dtype != DType::kFloat32 && request.dtype != DType::kBFloat16 && request.dtype != DType::kFloat16) {
    throw std::invalid_argument("hidden_states: dtype " + std::to_string(static_cast<uint32_t>(request.dtype)) +
                                " is unknown; allowed: 1 (float32), 2 (bfloat16), 3 (float16)");
  }
  if (request.rows > 0 && request.top_k == 0) throw std::invalid_argument("top_k is 0; it must be at least 1");
  const bool complete = request.hidden_states && request.topk_ids && request.topk_weights && output;
  if (request.rows > 0 && !complete) throw std::invalid_argument("forward: a buffer of the request is null");
}

void ExpertEngine::check_loaded(uint32_t layer) const {
  for (const RowGroups::Group& group : groups_.groups) {
    if (store_.holds(layer, group.expert)) continue;
    throw std::invalid_argument("layer " + std::to_string(layer) + ": expert " +
                                std::to_string(options_.expert_begin + group.expert) + " is not loaded");
  }
}

void ExpertEngine::count(const ExpertRequest& request, const NonfiniteCounts& nonfinite) {
  ++stats_.calls;
  stats_.rows += request.rows;
  stats_.nonfinite_inputs += nonfinite.inputs;
  stats_.nonfinite_outputs += nonfinite.outputs;
  ++stats_.layer_calls[request.layer];
  stats_.layer_rows[request.layer] += request.rows;
  stats_.layer_experts[request.layer] += groups_.groups.size();
  const size_t first = static_cast<size_t>(request.layer) * options_.num_experts;
  for (const RowGroups::Group& group : groups_.groups) stats_.expert_rows[first + group.expert] += group.rows;
}

}  // namespace moebius
