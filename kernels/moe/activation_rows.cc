#include "kernels/moe/activation_rows.h"

#include <algorithm>

namespace moebius {
namespace {

// One thread finishes this many in about the time of a barrier.
constexpr uint32_t kFewRows = 8;
constexpr uint32_t kTaskPairs = 16;

bool is_finished_later(const GemmKernel& kernel) {
  return kernel.row_type == RowType::kInt8 || kernel.prepare_row != nullptr;
}

}  // namespace

void ActivationRows::plan(const LayerCall& call) {
  intermediate_size_ = call.layout.intermediate_size;
  const auto num_pairs = static_cast<uint32_t>(call.groups.num_pairs());
  bool has[3] = {};
  prepared_stride_ = 0;
  for (const GroupWork& work : call.work) {
    has[static_cast<size_t>(work.down->row_type)] = true;
    if (work.down->prepare_row == nullptr) continue;
    prepared_stride_ = std::max(prepared_stride_, row_stride(work.down->prepared_row_bytes(call.layout.down)));
  }
  const bool quantised = has[static_cast<size_t>(RowType::kInt8)];
  const size_t k_padded = call.layout.down.k_padded;
  if (quantised || has[static_cast<size_t>(RowType::kFloat32)]) floats_.grow(num_pairs, k_padded * sizeof(float));
  if (has[static_cast<size_t>(RowType::kBFloat16)]) halves_.grow(num_pairs, k_padded * sizeof(uint16_t));
  if (quantised) {
    quantised_.grow(num_pairs, k_padded);
    scales_.resize(std::max<size_t>(scales_.size(), num_pairs));
  }
  prepared_.grow(num_pairs * prepared_stride_);
  prepared_rows_.resize(std::max<size_t>(prepared_rows_.size(), num_pairs));
  const size_t num_groups = call.work.size();
  if (num_groups > blocks_left_.size()) blocks_left_ = std::vector<std::atomic<uint32_t>>(num_groups);
  tasks_.clear();
  for (uint32_t group = 0; group < num_groups; ++group) plan_group(call, group);
}

void ActivationRows::plan_group(const LayerCall& call, uint32_t group) {
  const GemmKernel& kernel = *call.work[group].down;
  const RowGroups::Group& pairs = call.groups.groups[group];
  const uint32_t end = pairs.begin + pairs.rows;
  const bool later = is_finished_later(kernel);
  const bool few = pairs.rows <= kFewRows;
  blocks_left_[group].store(later && few ? call.layout.intermediate_blocks : 0, std::memory_order_relaxed);
  if (!later) return;
  if (kernel.prepare_row != nullptr) {
    for (uint32_t pair = pairs.begin; pair < end; ++pair) {
      prepared_rows_[pair] = prepared_.data() + pair * prepared_stride_;
    }
  }
  for (uint32_t begin = pairs.begin; !few && begin < end; begin += kTaskPairs) {
    tasks_.push_back({group, begin, std::min(begin + kTaskPairs, end)});
  }
}

void ActivationRows::store(const ActivationWork& results, RowType down_rows, uint32_t pair, uint32_t block) const {
  ActivationWork work = results;
  const bool narrow = down_rows == RowType::kBFloat16;
  const RowBuffer& target = narrow ? halves_ : floats_;
  const size_t element = narrow ? sizeof(uint16_t) : sizeof(float);
  work.output = target.row(pair) + size_t{block} * kPanelColumns * element;
  work.output_stride = target.stride() / element;
  (narrow ? vectors_.activate_bfloat16 : vectors_.activate_float32)(work);
}

void ActivationRows::stored(const LayerCall& call, uint32_t group, uint32_t num_blocks) {
  std::atomic<uint32_t>& left = blocks_left_[group];
  if (left.load(std::memory_order_relaxed) == 0) return;
  // Releases what this thread stored to the one that stores last, which acquires what all others did.
  if (left.fetch_sub(num_blocks, std::memory_order_acq_rel) != num_blocks) return;
  const RowGroups::Group& pairs = call.groups.groups[group];
  finish(call, {group, pairs.begin, pairs.begin + pairs.rows});
}

void ActivationRows::run_task(const LayerCall& call, uint32_t task) { finish(call, tasks_[task]); }

void ActivationRows::finish(const LayerCall& call, const PairRange& pairs) {
  const GemmKernel& kernel = *call.work[pairs.group].down;
  for (uint32_t pair = pairs.begin; pair < pairs.end; ++pair) {
    if (kernel.row_type == RowType::kInt8) {
      scales_[pair] = vectors_.quantise_row(reinterpret_cast<const float*>(floats_.row(pair)),
                                            reinterpret_cast<int8_t*>(quantised_.row(pair)), intermediate_size_);
    } else {
      kernel.prepare_row(call.layout.down, halves_.row(pair), prepared_.data() + pair * prepared_stride_);
    }
  }
}

ActivationRows::Rows ActivationRows::of_group(const LayerCall& call, uint32_t group) const {
  const GemmKernel& kernel = *call.work[group].down;
  const uint32_t begin = call.groups.groups[group].begin;
  if (kernel.prepare_row != nullptr) return {prepared_rows_.data() + begin, 0, nullptr};
  if (kernel.row_type == RowType::kInt8) {
    return {quantised_.pointers() + begin, quantised_.stride(), scales_.data() + begin};
  }
  const RowBuffer& rows = kernel.row_type == RowType::kFloat32 ? floats_ : halves_;
  return {rows.pointers() + begin, rows.stride(), nullptr};
}

}  // namespace moebius
