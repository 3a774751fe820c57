// The experts of one server: packed weights, threads, kernels and counters, as an ExpertBackend.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/isa/isa.h"
#include "kernels/moe/engine_options.h"
#include "kernels/moe/expert_backend.h"
#include "kernels/moe/expert_store.h"
#include "kernels/moe/kernel_plan.h"
#include "kernels/moe/moe_forward.h"
#include "kernels/moe/repairs.h"
#include "kernels/moe/row_groups.h"
#include "kernels/moe/task_trace.h"
#include "kernels/pool/thread_pool.h"

namespace moebius {

struct EngineStats {
  EngineStats(uint32_t num_layers, uint32_t num_experts)
      : layer_calls(num_layers),
        layer_rows(num_layers),
        layer_experts(num_layers),
        layer_busy_nanoseconds(num_layers),
        expert_rows(static_cast<size_t>(num_layers) * num_experts) {}

  std::atomic<uint64_t> calls{0};
  std::atomic<uint64_t> rows{0};               // of all calls
  std::atomic<uint64_t> busy_nanoseconds{0};   // inside forward, waiting for another caller excluded
  std::atomic<uint64_t> nonfinite_inputs{0};   // hidden_states values that were NaN or infinite
  std::atomic<uint64_t> nonfinite_outputs{0};  // output values that were NaN or infinite
  std::atomic<uint64_t> damaged_experts{0};    // found, each time
  std::atomic<uint64_t> repaired_experts{0};
  std::atomic<uint64_t> verified_bytes{0};     // of packed experts, by verify_expert
  std::vector<std::atomic<uint64_t>> layer_calls;  // [layers]
  std::vector<std::atomic<uint64_t>> layer_rows;   // [layers]
  std::vector<std::atomic<uint64_t>> layer_experts;  // [layers], experts with at least one row, summed over calls
  std::vector<std::atomic<uint64_t>> layer_busy_nanoseconds;  // [layers], of busy_nanoseconds
  std::vector<std::atomic<uint64_t>> expert_rows;  // [layers, experts]
};

// A chosen expert is damaged in memory and was not repacked; the message names it and says why. The Python exception
// class is a RuntimeError.
class DamagedExpert : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// --- The engine.

class ExpertEngine final : public ExpertBackend {
 public:
  // Throws std::invalid_argument naming the option and its value.
  explicit ExpertEngine(const EngineOptions& options);

  // See ExpertStore::reserve.
  void reserve(uint32_t layer, uint32_t count);

  // Packs one expert, given by its global id, and returns what rounding to the layer's format cost. Throws
  // std::invalid_argument when layer or expert are not held here or were loaded before, or when the source does
  // not fit. Thread safe; also during forward() of other experts.
  PackError load_expert(uint32_t layer, uint32_t expert, const ExpertSource& source);

  // See ExpertStore::fill.
  void fill(uint32_t layer, const ExpertStore::Writer& write);

  // The packed bytes of an expert, ExpertLayout::expert_bytes of its layer, valid as long as the engine. Throws
  // std::invalid_argument when it is not held here or not loaded.
  const std::byte* packed_expert(uint32_t layer, uint32_t expert) const;

  // Measures the kernels on the experts that are loaded and keeps the fastest; forward() waits meanwhile. Takes up to
  // about 0.3 s a distinct layout. A layout that no loaded expert has keeps its first candidates.
  void calibrate();

  uint32_t hidden_size() const override { return options_.hidden_size; }
  // One call at a time: a second caller waits. Throws std::invalid_argument when the layer is out of range
  // or a chosen expert is not loaded, DamagedExpert.
  //
  // An expert that a predecessor packed is compared with its checksum before its first use, and all chosen ones if an
  // output is not finite though the inputs were. A call that needs a damaged expert, or has used one by the time that it
  // is found, waits for its repair and computes again.
  void forward(const ExpertRequest& request, float* output) override;
  void expect_pauses(std::chrono::nanoseconds longest) override;
  void count_progress_in(uint64_t* word) override { pool_.count_progress_in(word); }

  const EngineOptions& options() const { return options_; }
  Isa isa() const { return isa_; }
  uint32_t num_threads() const { return pool_.size(); }
  // How long threads without work spin before they sleep.
  std::chrono::nanoseconds spin() const { return pool_.spin(); }
  const ExpertStore& store() const { return store_; }
  KernelPlan plan() const;
  // Uses the kernels of an earlier plan() of the same options: names and times, in the order of layouts, matrices,
  // requests and ranges. False, and nothing changes, when they do not fit.
  bool restore_plan(const std::vector<std::pair<std::string, double>>& choices);

  // See ExpertStore::fill_slots. Not during forward().
  void fill_slots() { store_.fill_slots(); }
  // Records in the segment that everything is packed, with a text for its next user; nothing without a segment.
  // Throws std::invalid_argument naming an expert that is missing.
  void finish_load(const std::string& load_record);
  // Verifies an expert by global id (ExpertStore::verify), at the lowest priority. One that is found damaged is
  // returned by wait_for_damage().
  bool verify_expert(uint32_t layer, uint32_t expert);

  // --- For the one thread that repairs, which is expected from expect_repairs(true) on.

  void expect_repairs(bool expected) { repairs_.expect(expected); }
  // (layer, global id) of the next expert that was found damaged by any thread; nothing within the time, or after
  // interrupt_damage_wait().
  std::optional<std::pair<uint32_t, uint32_t>> wait_for_damage(std::chrono::nanoseconds longest);
  void interrupt_damage_wait() { repairs_.interrupt(); }
  // Packs a damaged expert, by global id, again, and releases the calls that wait for it. False: the source is not what
  // was packed before. Throws std::invalid_argument when it does not fit or the expert is not damaged, DamagedExpert when
  // the memory does not keep what is written to it.
  bool repair_expert(uint32_t layer, uint32_t expert, const ExpertSource& source);
  // Calls that need the damaged expert are refused with the reason, until it is repaired after all.
  void give_up_expert(uint32_t layer, uint32_t expert, const std::string& reason);
  // By global id; see ExpertStore::record.
  const weights::ExpertRecord* segment_record(uint32_t layer, uint32_t expert) const;
  const EngineStats& stats() const { return stats_; }

  // Notes what each thread computes from the next call on, the first `most` spans of each; wait for a call under way.
  // start_trace throws std::invalid_argument while it is on.
  void start_trace(size_t most);
  // All spans, and how many more there were; nothing while it is off.
  std::pair<std::vector<TaskSpan>, uint64_t> stop_trace();

 private:
  void check_layer(uint32_t layer) const;
  uint32_t local_expert(uint32_t expert) const;
  void check_request(const ExpertRequest& request, const float* output) const;
  void check_loaded(uint32_t layer) const;
  bool verify(uint32_t layer, uint32_t local);
  void verify_chosen(uint32_t layer, bool all);
  const RowGroups::Group* damaged_group(uint32_t layer) const;
  NonfiniteCounts compute(const ExpertRequest& request, float* output, std::unique_lock<std::mutex>& lock);
  NonfiniteCounts run(const ExpertRequest& request, float* output);
  NonfiniteCounts run_in_turns(const ExpertRequest& request, float* output, uint32_t most);
  void wait_for_repair(uint32_t layer, uint32_t local, std::chrono::steady_clock::time_point since);
  std::string name_of(uint32_t layer, uint32_t local) const;
  std::vector<const std::byte*> loaded_experts(uint32_t layout_index) const;
  void count(const ExpertRequest& request, const NonfiniteCounts& nonfinite);

  EngineOptions options_;
  Isa isa_;
  ExpertStore store_;
  ThreadPool pool_;
  mutable std::mutex forward_mutex_;
  KernelPlan plan_;    // under forward_mutex_
  RowGroups groups_;   // under forward_mutex_
  RowGroups turn_;     // under forward_mutex_
  MoeForward moe_;     // under forward_mutex_
  TaskTrace trace_;    // under forward_mutex_
  Repairs repairs_;
  EngineStats stats_;
};

}  // namespace moebius
