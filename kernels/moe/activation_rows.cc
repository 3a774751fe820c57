#include "kernels/moe/activation_rows.h"

#include <algorithm>

namespace moebius {
namespace {

// Quantised by one thread in about the time of a barrier.
constexpr size_t kOwnElements = size_t{32} << 10;
constexpr uint32_t kTaskPairs = 16;

}  // namespace

void ActivationRows::plan(const LayerCall& call) {
  ++call_;
  intermediate_size_ = call.layout.intermediate_size;
  num_pairs_ = static_cast<uint32_t>(call.groups.num_pairs());
  bool has[3] = {};
  for (const GroupWork& work : call.work) has[static_cast<size_t>(work.down->row_type)] = true;
  const bool quantised = has[static_cast<size_t>(RowType::kInt8)];
  const size_t k_padded = call.layout.down.k_padded;
  if (quantised || has[static_cast<size_t>(RowType::kFloat32)]) floats_.grow(num_pairs_, k_padded * sizeof(float));
  if (has[static_cast<size_t>(RowType::kBFloat16)]) halves_.grow(num_pairs_, k_padded * sizeof(uint16_t));
  num_tasks_ = 0;
  if (!quantised) return;
  quantised_row_bytes_ = k_padded;
  is_common_ = size_t{num_pairs_} * intermediate_size_ > kOwnElements;
  if (!is_common_) return;
  num_tasks_ = (num_pairs_ + kTaskPairs - 1) / kTaskPairs;
  common_.rows.grow(num_pairs_, quantised_row_bytes_);
  common_.scales.resize(std::max<size_t>(common_.scales.size(), num_pairs_));
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

void ActivationRows::run_task(uint32_t task) {
  quantise(common_, task * kTaskPairs, std::min((task + 1) * kTaskPairs, num_pairs_));
}

void ActivationRows::quantise(Quantised& target, uint32_t begin, uint32_t end) const {
  for (uint32_t pair = begin; pair < end; ++pair) {
    target.scales[pair] =
        vectors_.quantise_row(reinterpret_cast<const float*>(floats_.row(pair)),
                              reinterpret_cast<int8_t*>(target.rows.row(pair)), intermediate_size_);
  }
}

ActivationRows::Rows ActivationRows::of_group(const RowGroups::Group& group, RowType type, uint32_t worker) {
  if (type != RowType::kInt8) {
    const RowBuffer& rows = type == RowType::kFloat32 ? floats_ : halves_;
    return {rows.pointers() + group.begin, rows.stride(), nullptr};
  }
  Quantised& quantised = is_common_ ? common_ : own_[worker];
  if (!is_common_ && quantised.call != call_) {
    quantised.rows.grow(num_pairs_, quantised_row_bytes_);
    quantised.scales.resize(std::max<size_t>(quantised.scales.size(), num_pairs_));
    quantise(quantised, 0, num_pairs_);
    quantised.call = call_;
  }
  return {quantised.rows.pointers() + group.begin, quantised.rows.stride(), quantised.scales.data() + group.begin};
}

}  // namespace moebius
