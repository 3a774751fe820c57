#include "kernels/moe/prepared_rows.h"

#include <algorithm>
#include <cstring>

namespace moebius {
namespace {

// Written by one thread in about the time of a barrier.
constexpr size_t kAtOnceBytes = size_t{16} << 10;
constexpr size_t kTaskBytes = size_t{8} << 10;

// From how many rows of a group on it matters that they do not collide in the cache.
constexpr uint32_t kManyRows = 8;

// Bytes between the rows of a group when they happen to be equally spaced and ascending, else 0.
size_t natural_stride(const uint32_t* rows, uint32_t count, size_t row_stride) {
  if (count < 2) return row_stride;
  const uint32_t step = rows[1] - rows[0];
  for (uint32_t i = 2; i < count; ++i) {
    if (rows[i] - rows[i - 1] != step) return 0;
  }
  return step * row_stride;
}

// Whether a kernel reads many rows of the type wherever they lie.
bool has_many_loose_rows(const LayerCall& call, RowType type) {
  for (size_t group = 0; group < call.work.size(); ++group) {
    const GemmKernel& kernel = *call.work[group].gate_up;
    const bool loose = kernel.row_type == type && kernel.spaced_rows < kManyRows;
    if (loose && call.groups.groups[group].rows >= kManyRows) return true;
  }
  return false;
}

template <class T>
void take(const T* source, const uint32_t* order, uint32_t count, std::byte* target) {
  auto* const to = reinterpret_cast<T*>(target);
  for (uint32_t i = 0; i < count; ++i) to[i] = source[order[i]];
}

bool has_type(DType dtype, RowType type) {
  return (dtype == DType::kFloat32 && type == RowType::kFloat32) ||
         (dtype == DType::kBFloat16 && type == RowType::kBFloat16);
}

}  // namespace

void PreparedRows::plan(const LayerCall& call) {
  layout_ = &call.layout.gate_up;
  hidden_size_ = call.layout.hidden_size;
  find_needs(call);
  find_preparations(call);
  const size_t pairs = call.groups.num_pairs();
  pointers_.resize(std::max(pointers_.size(), pairs));
  is_gathered_.resize(pointers_.size());
  pair_types_.resize(pointers_.size());
  pair_preparations_.resize(pointers_.size());
  pair_scales_.resize(pointers_.size());
  strides_.resize(call.groups.groups.size());
  size_t bytes = 0;
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kInt8}) {
    if (needs_[static_cast<size_t>(type)] != Need::kConvert) continue;
    const size_t row_bytes = call.layout.gate_up.k_padded * element_bytes(type);
    rows_[static_cast<size_t>(type)].grow(call.request.rows, row_bytes);
    bytes += call.request.rows * row_bytes;
  }
  for (uint32_t group = 0; group < call.groups.groups.size(); ++group) bytes += plan_group(call, group);
  plan_order(call);
  const bool prepares = num_preparations_ > 0 && num_order_tasks_ == 0;
  for (size_t i = 0; prepares && i < num_preparations_; ++i) bytes += call.request.rows * preparations_[i].stride;
  rows_per_task_ = call.request.rows;
  num_tasks_ = bytes == 0 ? 0 : 1;
  // A row takes a microsecond to prepare. In a task this goes on while other threads ask for the first weights.
  if (bytes > kAtOnceBytes || prepares) {
    rows_per_task_ = static_cast<uint32_t>(std::max<size_t>(1, call.request.rows * kTaskBytes / bytes));
    num_tasks_ = (call.request.rows + rows_per_task_ - 1) / rows_per_task_;
  } else if (bytes > 0) {
    run_task(0, call.request, call.groups);
    num_tasks_ = 0;
  }
}

void PreparedRows::find_needs(const LayerCall& call) {
  std::fill(std::begin(needs_), std::end(needs_), Need::kNone);
  for (const GroupWork& work : call.work) needs_[static_cast<size_t>(work.gate_up->row_type)] = Need::kConvert;
  Need& floats = needs_[static_cast<size_t>(RowType::kFloat32)];
  if (needs_[static_cast<size_t>(RowType::kInt8)] != Need::kNone) floats = Need::kConvert;
  const ExpertRequest& request = call.request;
  in_place_ = static_cast<const std::byte*>(request.hidden_states);
  const bool aligned = reinterpret_cast<uintptr_t>(in_place_) % 64 == 0;
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16}) {
    Need& need = needs_[static_cast<size_t>(type)];
    if (need == Need::kNone || !has_type(request.dtype, type)) continue;
    in_place_stride_ = hidden_size_ * element_bytes(type);
    const bool fits = aligned && call.layout.gate_up.k_padded == hidden_size_;
    if (fits && !(rows_collide(in_place_stride_) && has_many_loose_rows(call, type))) need = Need::kInPlace;
  }
}

void PreparedRows::find_preparations(const LayerCall& call) {
  num_preparations_ = 0;
  const size_t rows = layout_->format.ordered ? call.groups.num_pairs() : call.request.rows;
  for (const GroupWork& work : call.work) {
    if (work.gate_up->prepare_row == nullptr || preparation_of(*work.gate_up) != kNotPrepared) continue;
    if (num_preparations_ == preparations_.size()) preparations_.emplace_back();
    Preparation& preparation = preparations_[num_preparations_++];
    preparation.kernel = work.gate_up;
    preparation.stride = row_stride(work.gate_up->prepared_row_bytes(*layout_));
    preparation.rows.grow(rows * preparation.stride);
  }
}

uint8_t PreparedRows::preparation_of(const GemmKernel& kernel) const {
  for (size_t i = 0; i < num_preparations_; ++i) {
    if (preparations_[i].kernel == &kernel) return static_cast<uint8_t>(i);
  }
  return kNotPrepared;
}

// Sets the pointers of a group's rows; returns how many bytes there are to gather.
size_t PreparedRows::plan_group(const LayerCall& call, uint32_t group_index) {
  const RowGroups::Group& group = call.groups.groups[group_index];
  const GemmKernel& kernel = *call.work[group_index].gate_up;
  const RowType type = kernel.row_type;
  const uint32_t* rows = call.groups.pair_rows.data() + group.begin;
  size_t stride = natural_stride(rows, group.rows, source_stride(type));
  const bool has_order = call.layout.gate_up.format.ordered;
  const bool gather = has_order || (group.rows > 1 && group.rows <= kernel.spaced_rows && stride == 0);
  RowBuffer& gathered = gathered_[static_cast<size_t>(type)];
  if (gather) {
    gathered.grow(call.groups.num_pairs(), call.layout.gate_up.k_padded * element_bytes(type));
    stride = gathered.stride();
  }
  const uint8_t preparation = preparation_of(kernel);
  for (uint32_t i = 0; i < group.rows; ++i) {
    const uint32_t pair = group.begin + i;
    pointers_[pair] = gather ? gathered.row(pair) : row_source(type, rows[i]);
    if (preparation != kNotPrepared) pointers_[pair] = preparations_[preparation].row(has_order ? pair : rows[i]);
    pair_preparations_[pair] = preparation;
    is_gathered_[pair] = gather && !has_order;
    pair_types_[pair] = type;
  }
  strides_[group_index] = preparation == kNotPrepared ? stride : 0;
  return gather && !has_order ? group.rows * gathered.stride() : 0;
}

void PreparedRows::plan_order(const LayerCall& call) {
  num_order_tasks_ = 0;
  if (!call.layout.gate_up.format.ordered) return;
  const auto pairs = static_cast<uint32_t>(call.groups.num_pairs());
  pair_groups_.resize(pairs);
  for (uint32_t index = 0; index < call.groups.groups.size(); ++index) {
    const RowGroups::Group& group = call.groups.groups[index];
    std::fill_n(pair_groups_.begin() + group.begin, group.rows, index);
  }
  pairs_per_task_ = static_cast<uint32_t>(std::max<size_t>(1, kTaskBytes / (hidden_size_ * sizeof(uint16_t))));
  num_order_tasks_ = (pairs + pairs_per_task_ - 1) / pairs_per_task_;
}

void PreparedRows::run_order_task(uint32_t task, const LayerCall& call) {
  const uint32_t begin = task * pairs_per_task_;
  const auto end = std::min(begin + pairs_per_task_, static_cast<uint32_t>(call.groups.num_pairs()));
  for (uint32_t pair = begin; pair < end; ++pair) order_pair(call, pair);
}

void PreparedRows::order_pair(const LayerCall& call, uint32_t pair) const {
  const auto* const order =
      reinterpret_cast<const uint32_t*>(call.work[pair_groups_[pair]].expert + call.layout.order_offset);
  const RowType type = pair_types_[pair];
  const std::byte* const source = row_source(type, call.groups.pair_rows[pair]);
  std::byte* const target = gathered_[static_cast<size_t>(type)].row(pair);
  switch (type) {
    case RowType::kFloat32: take(reinterpret_cast<const float*>(source), order, hidden_size_, target); break;
    case RowType::kBFloat16: take(reinterpret_cast<const uint16_t*>(source), order, hidden_size_, target); break;
    case RowType::kInt8: take(reinterpret_cast<const int8_t*>(source), order, hidden_size_, target); break;
  }
  const uint8_t index = pair_preparations_[pair];
  if (index == kNotPrepared) return;
  const Preparation& preparation = preparations_[index];
  preparation.kernel->prepare_row(*layout_, target, preparation.row(pair));
}

void PreparedRows::run_task(uint32_t task, const ExpertRequest& request, const RowGroups& groups) {
  const uint32_t begin = task * rows_per_task_;
  const uint32_t end = std::min(begin + rows_per_task_, request.rows);
  for (uint32_t row = begin; row < end; ++row) run_row(row, request, groups);
}

void PreparedRows::run_row(uint32_t row, const ExpertRequest& request, const RowGroups& groups) {
  if (needs_[static_cast<size_t>(RowType::kFloat32)] == Need::kConvert) convert_row(row, request);
  if (needs_[static_cast<size_t>(RowType::kBFloat16)] == Need::kConvert) {
    const size_t bytes = hidden_size_ * element_bytes(RowType::kBFloat16);
    std::memcpy(rows_[static_cast<size_t>(RowType::kBFloat16)].row(row), in_place_ + row * bytes, bytes);
  }
  float scale = 1.0f;
  if (needs_[static_cast<size_t>(RowType::kInt8)] == Need::kConvert) {
    auto* target = reinterpret_cast<int8_t*>(rows_[static_cast<size_t>(RowType::kInt8)].row(row));
    scale = vectors_.quantise_row(reinterpret_cast<const float*>(row_source(RowType::kFloat32, row)), target,
                                  hidden_size_);
  }
  finish_pairs(row, request, groups, scale);
}

// What pairs of a row need but the row converted: its scale, a copy, or, each once, what their kernels prepare.
void PreparedRows::finish_pairs(uint32_t row, const ExpertRequest& request, const RowGroups& groups, float scale) {
  uint32_t prepared = layout_->format.ordered ? UINT32_MAX : 0;  // bits of preparations
  for (uint32_t choice = 0; choice < request.top_k; ++choice) {
    const uint32_t pair = groups.pair_of[size_t{row} * request.top_k + choice];
    if (pair == RowGroups::kNoPair) continue;
    pair_scales_[pair] = scale;
    const uint8_t index = pair_preparations_[pair];
    if (index != kNotPrepared && (prepared >> index & 1u) == 0) {
      prepared |= 1u << index;
      const Preparation& preparation = preparations_[index];
      preparation.kernel->prepare_row(*layout_, row_source(pair_types_[pair], row), preparation.row(row));
    }
    if (!is_gathered_[pair]) continue;
    const RowType type = pair_types_[pair];
    std::memcpy(gathered_[static_cast<size_t>(type)].row(pair), row_source(type, row),
                hidden_size_ * element_bytes(type));
  }
}

float* PreparedRows::convert_row(uint32_t row, const ExpertRequest& request) {
  auto* target = reinterpret_cast<float*>(rows_[static_cast<size_t>(RowType::kFloat32)].row(row));
  const size_t first = size_t{row} * hidden_size_;
  const auto* halves = static_cast<const uint16_t*>(request.hidden_states) + first;
  switch (request.dtype) {
    case DType::kFloat32:
      std::memcpy(target, static_cast<const float*>(request.hidden_states) + first, hidden_size_ * sizeof(float));
      break;
    case DType::kBFloat16: vectors_.bfloat16_to_float32(halves, target, hidden_size_); break;
    case DType::kFloat16: vectors_.float16_to_float32(halves, target, hidden_size_); break;
  }
  return target;
}

const std::byte* PreparedRows::row_source(RowType type, uint32_t row) const {
  const auto index = static_cast<size_t>(type);
  return needs_[index] == Need::kInPlace ? in_place_ + row * in_place_stride_ : rows_[index].row(row);
}

size_t PreparedRows::source_stride(RowType type) const {
  const auto index = static_cast<size_t>(type);
  return needs_[index] == Need::kInPlace ? in_place_stride_ : rows_[index].stride();
}

PreparedRows::Rows PreparedRows::of_group(uint32_t group, const RowGroups& groups) const {
  const uint32_t begin = groups.groups[group].begin;
  return {pointers_.data() + begin, strides_[group], pair_scales_.data() + begin};
}

}  // namespace moebius
