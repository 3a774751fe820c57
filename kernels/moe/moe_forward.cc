#include "kernels/moe/moe_forward.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "kernels/moe/expert_backend.h"
#include "kernels/moe/task_cuts.h"

namespace moebius {

template <class T, T kExponent>
uint64_t count_full_exponents(const T* values, size_t count) {
  uint64_t found = 0;
  for (size_t i = 0; i < count; ++i) found += (values[i] & kExponent) == kExponent;
  return found;
}

// Columns [begin, begin + count) of rows [rows, stride].
inline uint64_t count_nonfinite_block(DType dtype, const void* values, uint32_t rows, size_t stride, size_t begin,
                                      size_t count) {
  uint64_t found = 0;
  for (uint32_t row = 0; row < rows; ++row) {
    const size_t at = row * stride + begin;
    const auto* words = static_cast<const uint32_t*>(values) + at;
    const auto* halves = static_cast<const uint16_t*>(values) + at;
    switch (dtype) {
      case DType::kFloat32: found += count_full_exponents<uint32_t, 0x7f800000u>(words, count); break;
      case DType::kBFloat16: found += count_full_exponents<uint16_t, 0x7f80>(halves, count); break;
      case DType::kFloat16: found += count_full_exponents<uint16_t, 0x7c00>(halves, count); break;
    }
  }
  return found;
}

namespace {

// Contiguous weights of the smallest tasks. Reading few at a time costs bandwidth; a task of phase B reads as many
// from each expert.
constexpr size_t kLeastGateUpBytes = size_t{32} << 10;
constexpr size_t kLeastDownBytes = size_t{4} << 10;

// Bytes of the next expert's panels in phase B, prefetched before a GEMM on tiles multiplies the ones before: a stream
// of a few KiB is over before hardware prefetchers have found it. Other GEMMs go from one to the next themselves.
constexpr size_t kPrefetchBytes = size_t{4} << 10;

// Bytes of a thread's first task of a phase, prefetched while others finish the phase before.
constexpr size_t kPrepareBytes = size_t{64} << 10;

void prefetch(const std::byte* weights, size_t bytes) {
  for (size_t line = 0; line < std::min(bytes, kPrefetchBytes); line += 64) __builtin_prefetch(weights + line, 0, 2);
}

// Whether a kernel asks for the first panels of `GemmWork::next`.
bool fetches_next(const GemmKernel& kernel) { return kernel.spaced_rows == 0; }

// Of gate's and up's panels for 16 channels.
size_t bytes_of_block(const ExpertLayout& layout) {
  return layout.mixed ? layout.gate_step + layout.up_step : layout.gate_step;
}

size_t divide_up(size_t value, size_t by) { return (value + by - 1) / by; }

// Cost of a unit of weights for a number of rows, in bytes read: computing catches up with memory at some rows.
double unit_cost(size_t bytes, uint32_t rows) { return static_cast<double>(bytes) * (1.0 + rows / 16.0); }

// Bytes of the result of one panel's GEMM with a group's rows.
size_t result_bytes(uint32_t rows, size_t row_bytes) {
  return kPanelColumns * sizeof(float) * rows_per_call(rows, row_bytes);
}

}  // namespace

MoeForward::MoeForward(const EngineOptions& options, const VectorKernels& vectors, const ExpertStore& store,
                       const KernelPlan& plan, ThreadPool& pool)
    : options_(options),
      vectors_(vectors),
      store_(store),
      plan_(plan),
      pool_(pool),
      rows_(vectors),
      activation_(vectors),
      scratch_(pool.size()) {}

NonfiniteCounts MoeForward::run(const ExpertRequest& request, const RowGroups& groups, float* output,
                                TaskTrace* trace, bool adds) {
  adds_ = adds;
  choose_kernels(request, groups);
  const LayerCall call{request, groups, store_.layout(request.layer), work_};
  cut_gate_up(call);
  cut_down(call);
  activation_.plan(call);
  rows_.plan(call);
  nonfinite_inputs_.store(0, std::memory_order_relaxed);
  nonfinite_outputs_.store(0, std::memory_order_relaxed);
  const auto of_call = [&](TaskKind kind, uint32_t worker) {
    return TaskScope(trace, kind, worker, request.layer, -1, request.rows);
  };
  pool_.run_phases(
      pool_phase(rows_.num_tasks(),
                 [&](uint32_t task, uint32_t worker) {
                   const TaskScope scope = of_call(TaskKind::kRows, worker);
                   rows_.run_task(task, request, groups);
                 }),
      pool_phase(rows_.num_order_tasks(),
                 [&](uint32_t task, uint32_t worker) {
                   const TaskScope scope = of_call(TaskKind::kRows, worker);
                   rows_.run_order_task(task, call);
                 }),
      pool_phase(gate_up_tasks_.size(),
                 [&](uint32_t task, uint32_t worker, NextTask next) {
                   const RowGroups::Group& group = groups.groups[gate_up_tasks_[task].group];
                   if (ColdExperts* const cold = store_.cold()) cold->await(request.layer, group.expert);
                   const auto expert = static_cast<int32_t>(options_.expert_begin + group.expert);
                   const TaskScope scope(trace, TaskKind::kGateUp, worker, request.layer, expert, group.rows);
                   run_gate_up(gate_up_tasks_[task], call, worker, panels_of(next, call));
                 },
                 [&](uint32_t task, const auto& opened) { prefetch_gate_up(gate_up_tasks_[task], call, opened); }),
      pool_phase(activation_.num_tasks(),
                 [&](uint32_t task, uint32_t worker) {
                   const TaskScope scope = of_call(TaskKind::kActivation, worker);
                   activation_.run_task(call, task);
                 }),
      pool_phase(down_tasks_.size(),
                 [&](uint32_t task, uint32_t worker, NextTask next) {
                   const TaskScope scope = of_call(TaskKind::kDown, worker);
                   run_down(down_tasks_[task], call, output, worker, panels_of(next, call));
                 },
                 [&](uint32_t task, const auto& opened) { prefetch_down(down_tasks_[task], call, opened); }));
  return {nonfinite_inputs_.load(std::memory_order_relaxed), nonfinite_outputs_.load(std::memory_order_relaxed)};
}

void MoeForward::choose_kernels(const ExpertRequest& request, const RowGroups& groups) {
  const RequestKind kind = request.dtype == DType::kBFloat16 ? RequestKind::kBFloat16 : RequestKind::kFloat32;
  const uint32_t layout = store_.layout_index(request.layer);
  const MatrixPlan& gate_up = plan_.matrix(layout, MatrixKind::kGateUp, kind);
  const MatrixPlan& down = plan_.matrix(layout, MatrixKind::kDown, kind);
  const bool mixed = store_.layout(request.layer).mixed;
  work_.clear();
  for (const RowGroups::Group& group : groups.groups) {
    work_.push_back(
        {&gate_up.kernel(group.rows), &down.kernel(group.rows), store_.find(request.layer, group.expert)});
    if (mixed) choose_gate(plan_.matrix(layout, MatrixKind::kGate, kind), gate_up, group.rows, work_.back());
  }
}

// Gate and up read the same rows. What a kernel prepares depends on the format, so that the same kernel's rows for up are
// not gate's: where it prepares them, or the two want different types, both take float32 ones.
void MoeForward::choose_gate(const MatrixPlan& gate, const MatrixPlan& up, uint32_t rows, GroupWork& work) {
  work.gate = &gate.kernel(rows);
  const bool prepared = work.gate->prepare_row != nullptr || work.gate_up->prepare_row != nullptr;
  if (work.gate->row_type == work.gate_up->row_type && !prepared) return;
  work.gate = gate.wide_kernel();
  work.gate_up = up.wide_kernel();
}

void MoeForward::cut_gate_up(const LayerCall& call) {
  const auto& groups = call.groups.groups;
  const uint32_t together = call.layout.panels_per_column_block;
  const size_t block_bytes = bytes_of_block(call.layout);
  order_.resize(groups.size());
  std::iota(order_.begin(), order_.end(), 0u);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](uint32_t a, uint32_t b) { return groups[a].rows > groups[b].rows; });
  if (const ColdExperts* const cold = store_.cold()) {
    std::stable_partition(order_.begin(), order_.end(),
                          [&](uint32_t group) { return cold->is_read(call.request.layer, groups[group].expert); });
  }
  double total = 0.0;
  for (const RowGroups::Group& group : groups) {
    total += call.layout.intermediate_blocks * unit_cost(block_bytes, group.rows);
  }
  TaskCutter cutter(total, pool_.size());
  gate_up_tasks_.clear();
  for (const uint32_t group : order_) {
    const size_t row_bytes = call.layout.gate_up.k_padded * element_bytes(call.work[group].gate_up->row_type);
    const TaskUnit unit{unit_cost(block_bytes, groups[group].rows),
                        block_bytes,
                        together * result_bytes(groups[group].rows, row_bytes),
                        kLeastGateUpBytes,
                        most_task_bytes(groups[group].rows * row_bytes),
                        2 / together};
    cutter.cut(call.layout.intermediate_blocks, unit, [&](uint32_t block, uint32_t count) {
      gate_up_tasks_.push_back({group, block, count});
    });
  }
}

// Every task reads the activation of all rows: with many rows tasks are as wide as leaves one for each thread.
void MoeForward::cut_down(const LayerCall& call) {
  const uint32_t panels = call.layout.down_panels;
  const size_t panel_bytes = call.layout.down.panel_bytes;
  size_t all_row_bytes = 0;
  size_t most_results = 1;
  for (size_t group = 0; group < call.work.size(); ++group) {
    const size_t row_bytes = call.layout.down.k_padded * element_bytes(call.work[group].down->row_type);
    const uint32_t rows = call.groups.groups[group].rows;
    all_row_bytes += rows * row_bytes;
    most_results = std::max(most_results, result_bytes(rows, row_bytes));
  }
  const size_t group_row_bytes = all_row_bytes / std::max<size_t>(call.work.size(), 1);
  const size_t widest = std::max(kLeastDownBytes, divide_up(panels, pool_.size()) * panel_bytes);
  const TaskUnit unit{1.0,
                      panel_bytes,
                      most_results,
                      std::clamp(group_row_bytes / 2, kLeastDownBytes, widest),
                      most_task_bytes(group_row_bytes),
                      1u};
  TaskCutter cutter(panels, pool_.size());
  down_tasks_.clear();
  cutter.cut_whole(panels, unit, [&](uint32_t panel, uint32_t count) { down_tasks_.push_back({panel, count}); });
}

const std::byte* MoeForward::gate_up_panels(const GateUpTask& task, const LayerCall& call) const {
  return call.work[task.group].expert + task.block * call.layout.gate_step;
}

const std::byte* MoeForward::down_panels(const DownTask& task, const LayerCall& call, uint32_t group) const {
  return call.work[group].expert + call.layout.down_offset + task.panel * call.layout.down.panel_bytes;
}

const std::byte* MoeForward::panels_of(const NextTask& next, const LayerCall& call) const {
  if (next.phase == kGateUpPhase) return gate_up_panels(gate_up_tasks_[next.task], call);
  if (next.phase == kDownPhase && !call.work.empty()) return down_panels(down_tasks_[next.task], call, 0);
  return nullptr;
}

void MoeForward::multiply(const GemmKernel& kernel, GemmWork& work, uint32_t worker) {
  multiply_into(kernel, work, worker, size_t{kPanelColumns} * work.num_panels, 0);
}

// The result's first column is `column` of `width`.
void MoeForward::multiply_into(const GemmKernel& kernel, GemmWork& work, uint32_t worker, size_t width,
                               size_t column) {
  WorkerScratch& scratch = scratch_[worker];
  work.result_stride = width;
  scratch.result.grow(work.num_rows * width * sizeof(float));
  scratch.gemm.grow(kernel.scratch_bytes(*work.layout, work.num_panels, work.num_rows));
  work.result = scratch.result.as<float>() + column;
  work.scratch = scratch.gemm.data();
  // What the thread read before has asked for the first panels, if it knew of them and its kernel does that.
  work.was_next = scratch.fetched == work.panels;
  scratch.fetched = fetches_next(kernel) ? work.next : nullptr;
  kernel.run(work);
}

// Gate's product, then up's beside it; `work` is for both as they follow one another where they have one format.
void MoeForward::multiply_apart(const GroupWork& weights, const GateUpTask& task, const ExpertLayout& layout,
                                GemmWork& work, uint32_t worker) {
  const size_t width = size_t{kPanelColumns} * work.num_panels;
  GemmWork up = work;
  up.panels = weights.expert + layout.up_offset + task.block * layout.up_step;
  work.layout = &layout.gate;
  work.num_panels = up.num_panels = task.num_blocks;
  work.next = up.panels;
  multiply_into(*weights.gate, work, worker, width, 0);
  multiply_into(*weights.gate_up, up, worker, width, width / 2);
}

void MoeForward::run_gate_up(const GateUpTask& task, const LayerCall& call, uint32_t worker, const std::byte* next) {
  const RowGroups::Group& group = call.groups.groups[task.group];
  const GroupWork& weights = call.work[task.group];
  const ExpertLayout& layout = call.layout;
  const PreparedRows::Rows rows = rows_.of_group(task.group, call.groups);
  const uint32_t panels = task.num_blocks * layout.panels_per_column_block;
  const uint32_t step = rows_per_call(group.rows, layout.gate_up.k_padded * element_bytes(weights.gate_up->row_type));
  for (uint32_t row = 0; row < group.rows; row += step) {
    const uint32_t count = std::min(step, group.rows - row);
    GemmWork work{&layout.gate_up,
                     gate_up_panels(task, call),
                     panels,
                     rows.rows + row,
                     rows.stride,
                     rows.scales + row,
                     count,
                     nullptr,
                     0,
                     nullptr,
                     row + count == group.rows ? next : nullptr};
    if (layout.mixed) {
      multiply_apart(weights, task, layout, work, worker);
    } else {
      multiply(*weights.gate_up, work, worker);
    }
    const float limit = options_.limits[call.request.layer];
    const ActivationWork results{options_.activation, options_.alpha,  limit,   work.result, work.result_stride,
                                 count,               task.num_blocks, nullptr, 0,           layout.mixed};
    activation_.store(results, weights.down->row_type, group.begin + row, task.block);
  }
  activation_.stored(call, task.group, task.num_blocks);
}

template <class Opened>
void MoeForward::prefetch_gate_up(const GateUpTask& task, const LayerCall& call, const Opened& opened) const {
  const size_t bytes = std::min(kPrepareBytes, task.num_blocks * call.layout.gate_step);
  const std::byte* const begin = gate_up_panels(task, call);
  for (size_t at = 0; at < bytes && !opened(); at += kPrefetchBytes) prefetch(begin + at, bytes - at);
}

template <class Opened>
void MoeForward::prefetch_down(const DownTask& task, const LayerCall& call, const Opened& opened) const {
  const size_t bytes = task.num_panels * call.layout.down.panel_bytes;
  size_t left = kPrepareBytes;
  for (uint32_t group = 0; group < call.work.size(); ++group) {
    const std::byte* const begin = down_panels(task, call, group);
    for (size_t at = 0; at < bytes; at += kPrefetchBytes) {
      if (left < kPrefetchBytes || opened()) return;
      left -= kPrefetchBytes;
      prefetch(begin + at, bytes - at);
    }
  }
}

void MoeForward::run_down(const DownTask& task, const LayerCall& call, float* output, uint32_t worker,
                          const std::byte* next) {
  const uint32_t hidden = call.layout.hidden_size;
  const uint32_t column = task.panel * kPanelColumns;
  const uint32_t columns = std::min(task.num_panels * kPanelColumns, hidden - column);
  // Sums are kept together: rows of the output lie pages apart.
  const size_t width = size_t{task.num_panels} * kPanelColumns;
  AlignedBuffer& buffer = scratch_[worker].sums;
  buffer.grow(call.request.rows * width * sizeof(float));
  float* const sums = buffer.as<float>();
  std::memset(sums, 0, call.request.rows * width * sizeof(float));
  if (adds_) {
    for (uint32_t row = 0; row < call.request.rows; ++row) {
      std::memcpy(sums + row * width, output + size_t{row} * hidden + column, columns * sizeof(float));
    }
  }
  const size_t bytes = task.num_panels * call.layout.down.panel_bytes;
  for (uint32_t group = 0; group < call.work.size(); ++group) {
    const std::byte* const after = group + 1 < call.work.size() ? down_panels(task, call, group + 1) : next;
    if (after != nullptr && !fetches_next(*call.work[group].down)) prefetch(after, bytes);
    add_group(task, call, group, sums, worker, after);
  }
  for (uint32_t row = 0; row < call.request.rows; ++row) {
    std::memcpy(output + size_t{row} * hidden + column, sums + row * width, columns * sizeof(float));
  }
  count_nonfinite(task, call, sums);
}

void MoeForward::add_group(const DownTask& task, const LayerCall& call, uint32_t group_index, float* sums,
                           uint32_t worker, const std::byte* next) {
  const RowGroups::Group& group = call.groups.groups[group_index];
  const GroupWork& weights = call.work[group_index];
  const PanelLayout& layout = call.layout.down;
  const uint32_t width = task.num_panels * kPanelColumns;
  const ActivationRows::Rows rows = activation_.of_group(call, group_index);
  const uint32_t step = rows_per_call(group.rows, layout.k_padded * element_bytes(weights.down->row_type));
  for (uint32_t row = 0; row < group.rows; row += step) {
    const uint32_t count = std::min(step, group.rows - row);
    const uint32_t pair = group.begin + row;
    GemmWork work{&layout,
                     down_panels(task, call, group_index),
                     task.num_panels,
                     rows.rows + row,
                     rows.stride,
                     rows.scales == nullptr ? nullptr : rows.scales + row,
                     count,
                     nullptr,
                     0,
                     nullptr,
                     row + count == group.rows ? next : nullptr};
    multiply(*weights.down, work, worker);
    vectors_.scatter({work.result, work.result_stride, call.groups.pair_rows.data() + pair,
                      call.groups.pair_weights.data() + pair, count, width, sums, width});
  }
}

// Each task looks at its own columns of input and output.
void MoeForward::count_nonfinite(const DownTask& task, const LayerCall& call, const float* sums) {
  const uint32_t hidden = call.layout.hidden_size;
  const uint32_t column = task.panel * kPanelColumns;
  const uint32_t columns = std::min(task.num_panels * kPanelColumns, hidden - column);
  const ExpertRequest& request = call.request;
  const uint64_t inputs =
      count_nonfinite_block(request.dtype, request.hidden_states, request.rows, hidden, column, columns);
  const size_t width = size_t{task.num_panels} * kPanelColumns;
  const uint64_t outputs = count_nonfinite_block(DType::kFloat32, sums, request.rows, width, 0, columns);
  if (inputs != 0) nonfinite_inputs_.fetch_add(inputs, std::memory_order_relaxed);
  if (outputs != 0) nonfinite_outputs_.fetch_add(outputs, std::memory_order_relaxed);
}

}  // namespace moebius
