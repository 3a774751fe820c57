#include "kernels/moe/moe_forward.h"

#include <algorithm>
#include <atomic>
#include <bit>

#include "kernels/moe/bfloat16.h"

namespace moebius {
namespace {

// The most panels a task computes: few rows keep that many in flight together.
constexpr uint32_t kMaxTaskPanels = 4;

// Exponent bits all set: infinity or NaN. By bits, so that no compiler flag can argue it away.
uint64_t count_nonfinite(const float* values, size_t count) {
  constexpr uint32_t kExponent = 0x7f800000u;
  uint32_t found = 0;
  for (size_t i = 0; i < count; ++i) found += (std::bit_cast<uint32_t>(values[i]) & kExponent) == kExponent;
  return found;
}

template <class T>
void grow(std::vector<T>& scratch, size_t size) {
  if (scratch.size() < size) scratch.resize(size);
}

}  // namespace

MoeForward::MoeForward(const KernelTable& kernels, const ExpertStore& store, ThreadPool& pool)
    : kernels_(kernels),
      store_(store),
      pool_(pool),
      shape_(store.shape()),
      activation_stride_((static_cast<size_t>(shape_.gate_up_panels) * shape_.lanes + 15) / 16 * 16) {}

uint64_t MoeForward::run(const ExpertRequest& request, const RowGroups& groups, float* output) {
  prepare(request, groups);
  pool_.parallel_for(static_cast<uint32_t>(gate_up_tasks_.size()), [&](uint32_t task, uint32_t) {
    run_gate_up(gate_up_tasks_[task], request, groups);
  });
  const uint32_t step = down_panels_per_task();
  std::atomic<uint64_t> nonfinite{0};
  pool_.parallel_for((shape_.down_panels + step - 1) / step, [&](uint32_t task, uint32_t) {
    const uint32_t panel = task * step;
    const uint64_t found = run_down(panel, std::min(step, shape_.down_panels - panel), request, groups, output);
    if (found != 0) nonfinite.fetch_add(found, std::memory_order_relaxed);
  });
  return nonfinite.load();
}

const float* MoeForward::rows_as_float(const ExpertRequest& request) {
  if (request.dtype == DType::kFloat32) return static_cast<const float*>(request.hidden_states);
  const auto* bits = static_cast<const uint16_t*>(request.hidden_states);
  const size_t count = static_cast<size_t>(request.rows) * shape_.hidden_size;
  grow(converted_rows_, count);
  for (size_t i = 0; i < count; ++i) converted_rows_[i] = bfloat16_to_float(bits[i]);
  return converted_rows_.data();
}

void MoeForward::prepare(const ExpertRequest& request, const RowGroups& groups) {
  const size_t pairs = groups.pair_rows.size();
  const float* rows = rows_as_float(request);
  grow(row_pointers_, pairs);
  grow(activation_, pairs * activation_stride_);
  for (size_t pair = 0; pair < pairs; ++pair) {
    row_pointers_[pair] = rows + static_cast<size_t>(groups.pair_rows[pair]) * shape_.hidden_size;
  }
  plan_gate_up(groups);
}

// About four tasks a thread, busiest experts first, so that the last ones to finish are small.
void MoeForward::plan_gate_up(const RowGroups& groups) {
  const size_t panels = groups.groups.size() * shape_.gate_up_panels;
  const auto step = static_cast<uint32_t>(std::clamp<size_t>(panels / (4 * pool_.size()), 1, kMaxTaskPanels));
  gate_up_tasks_.clear();
  for (uint32_t group = 0; group < groups.groups.size(); ++group) {
    for (uint32_t panel = 0; panel < shape_.gate_up_panels; panel += step) {
      gate_up_tasks_.push_back({group, panel, std::min(step, shape_.gate_up_panels - panel)});
    }
  }
  std::stable_sort(gate_up_tasks_.begin(), gate_up_tasks_.end(), [&](const GateUpTask& a, const GateUpTask& b) {
    return groups.groups[a.group].rows > groups.groups[b.group].rows;
  });
}

// The largest step whose slowest thread does no more panels than with any smaller one.
uint32_t MoeForward::down_panels_per_task() const {
  uint32_t best = 1;
  uint32_t best_panels = UINT32_MAX;
  for (uint32_t step = 1; step <= kMaxTaskPanels; ++step) {
    const uint32_t tasks = (shape_.down_panels + step - 1) / step;
    const uint32_t slowest = std::min((tasks + pool_.size() - 1) / pool_.size() * step, shape_.down_panels);
    if (slowest <= best_panels) {
      best = step;
      best_panels = slowest;
    }
  }
  return best;
}

void MoeForward::run_gate_up(const GateUpTask& task, const ExpertRequest& request, const RowGroups& groups) {
  const RowGroups::Group& group = groups.groups[task.group];
  GateUpWork work;
  work.panels = store_.find(request.layer, group.expert) + task.panel * shape_.gate_up_panel_bytes;
  work.num_panels = task.num_panels;
  work.k = shape_.hidden_size;
  work.rows = row_pointers_.data() + group.begin;
  work.num_rows = group.rows;
  work.activation = activation_.data() + group.begin * activation_stride_ + task.panel * shape_.lanes;
  work.activation_stride = activation_stride_;
  (shape_.dtype == DType::kFloat32 ? kernels_.gate_up_float32 : kernels_.gate_up_bfloat16)(work);
}

uint64_t MoeForward::run_down(uint32_t first_panel, uint32_t num_panels, const ExpertRequest& request,
                              const RowGroups& groups, float* output) const {
  const uint32_t panel_columns = 2 * shape_.lanes;
  const uint32_t column = first_panel * panel_columns;
  const uint32_t columns = std::min(num_panels * panel_columns, shape_.hidden_size - column);
  for (uint32_t row = 0; row < request.rows; ++row) {
    std::fill_n(output + static_cast<size_t>(row) * shape_.hidden_size + column, columns, 0.0f);
  }
  for (const RowGroups::Group& group : groups.groups) {
    DownWork work;
    work.panels = store_.find(request.layer, group.expert) + shape_.down_offset + first_panel * shape_.down_panel_bytes;
    work.num_panels = num_panels;
    work.k = shape_.intermediate_size;
    work.activation = activation_.data() + group.begin * activation_stride_;
    work.activation_stride = activation_stride_;
    work.row_ids = groups.pair_rows.data() + group.begin;
    work.weights = groups.pair_weights.data() + group.begin;
    work.num_rows = group.rows;
    work.output = output + column;
    work.output_stride = shape_.hidden_size;
    work.num_columns = columns;
    (shape_.dtype == DType::kFloat32 ? kernels_.down_float32 : kernels_.down_bfloat16)(work);
  }
  uint64_t nonfinite = 0;
  for (uint32_t row = 0; row < request.rows; ++row) {
    nonfinite += count_nonfinite(output + static_cast<size_t>(row) * shape_.hidden_size + column, columns);
  }
  return nonfinite;
}

}  // namespace moebius
