#include "kernels/dense/dense_matrix.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/format/pack.h"
#include "kernels/format/panel_values.h"
#include "kernels/moe/layer_call.h"
#include "kernels/moe/task_cuts.h"

namespace moebius::dense {
namespace {

// Weights of the smallest tasks, read in one run.
constexpr size_t kLeastTaskBytes = size_t{32} << 10;
// From how many rows on it matters that they do not collide in the cache.
constexpr uint32_t kManyRows = 8;
// Rows and bytes from which on rows are converted by all threads.
constexpr size_t kParallelBytes = size_t{64} << 10;

size_t element_size(DType type) { return type == DType::kFloat32 ? sizeof(float) : sizeof(uint16_t); }

bool is_type(DType dtype, RowType type) {
  return (dtype == DType::kFloat32) == (type == RowType::kFloat32);
}

void check_format(const WeightFormat& format) {
  if (!format.quantised_rows && !format.ordered) return;
  throw std::invalid_argument("dense layers are not kept as '" + weight_format_name(format) + "': it has " +
                              (format.ordered ? "its columns sorted" : "its rows quantised"));
}

}  // namespace

DenseMatrix::DenseMatrix(std::shared_ptr<DenseThreads> threads, uint32_t in_features,
                         const std::vector<PartShape>& parts, std::byte* memory, size_t memory_bytes)
    : threads_(std::move(threads)), in_features_(in_features) {
  size_t used = 0;
  for (const PartShape& shape : parts) {
    check_format(shape.format);
    LayoutPlan& plan = threads_->plan(shape.format, in_features);
    const auto panels = (shape.rows + kPanelColumns - 1) / kPanelColumns;
    const auto known = std::find_if(inputs_.begin(), inputs_.end(),
                                    [&](const Input& input) { return input.plan == &plan; });
    const auto input = static_cast<size_t>(known - inputs_.begin());
    if (known == inputs_.end()) inputs_.push_back({&plan});
    parts_.push_back({&plan, out_features_, shape.rows, panels, input, memory + used});
    out_features_ += shape.rows;
    used += panels * plan.layout.panel_bytes;
  }
  if (used != memory_bytes || reinterpret_cast<uintptr_t>(memory) % 64 != 0) {
    throw std::invalid_argument("memory has " + std::to_string(memory_bytes) + " bytes; the packed parts take " +
                                std::to_string(used) + ", 64-byte aligned");
  }
}

void DenseMatrix::pack(uint32_t part, uint32_t first_row, const SourceMatrix& source) {
  const Part& target = parts_.at(part);
  if (first_row % kPanelColumns != 0 || first_row + source.rows > target.rows) {
    throw std::invalid_argument("rows " + std::to_string(first_row) + " to " +
                                std::to_string(first_row + source.rows) + " do not fit a part of " +
                                std::to_string(target.rows) + " rows, which is packed from multiples of 16 on");
  }
  const uint32_t count = (source.rows + kPanelColumns - 1) / kPanelColumns;
  const size_t bytes = target.plan->layout.panel_bytes;
  pack_panels(source, target.plan->layout, {0, count, bytes}, target.packed + first_row / kPanelColumns * bytes);
}

void DenseMatrix::calibrate() {
  for (const Part& part : parts_) threads_->calibrate(*part.plan, part.packed, part.panels);
}

void DenseMatrix::multiply(const Product& product) {
  if (product.num_rows == 0) return;
  const std::lock_guard<std::mutex> lock(threads_->call_mutex());
  choose_kernels(product);
  prepare_rows(product);
  cut(product);
  threads_->pool().parallel_for(static_cast<uint32_t>(tasks_.size()), [&](uint32_t task, uint32_t worker) {
    run(tasks_[task], product, worker);
  });
}

void DenseMatrix::choose_kernels(const Product& product) {
  for (Input& input : inputs_) {
    const MatrixPlan& plan = product.row_type == DType::kBFloat16 ? input.plan->bfloat16 : input.plan->float32;
    input.kernel = &plan.kernel(product.num_rows);
  }
}

// The rows in `type`, 64-byte aligned and zero padded, `stride` bytes apart: where they lie, or a copy.
const std::byte* DenseMatrix::convert_rows(const Product& product, RowType type, size_t& stride) {
  const uint32_t padded = inputs_.front().plan->layout.k_padded;
  const auto* const rows = static_cast<const std::byte*>(product.rows);
  const size_t own_stride = product.row_stride * element_size(product.row_type);
  const bool aligned = reinterpret_cast<uintptr_t>(rows) % 64 == 0 && own_stride % 64 == 0;
  const bool collides = product.num_rows >= kManyRows && rows_collide(own_stride);
  if (is_type(product.row_type, type) && aligned && padded == in_features_ && !collides) {
    stride = own_stride;
    return rows;
  }
  stride = row_stride(padded * element_bytes(type));
  AlignedBuffer& buffer = converted_[static_cast<size_t>(type)];
  buffer.grow(product.num_rows * stride);
  const VectorKernels& vectors = threads_->vectors();
  const auto convert = [&](uint32_t row) {
    std::byte* const target = buffer.data() + row * stride;
    const std::byte* const source = rows + row * own_stride;
    if (is_type(product.row_type, type)) {
      std::memcpy(target, source, in_features_ * element_bytes(type));
    } else {
      vectors.bfloat16_to_float32(reinterpret_cast<const uint16_t*>(source), reinterpret_cast<float*>(target),
                                  in_features_);
    }
  };
  if (product.num_rows * stride < kParallelBytes) {
    for (uint32_t row = 0; row < product.num_rows; ++row) convert(row);
  } else {
    threads_->pool().parallel_for(product.num_rows, [&](uint32_t row, uint32_t) { convert(row); });
  }
  return buffer.data();
}

void DenseMatrix::prepare_rows(const Product& product) {
  const std::byte* found[2] = {nullptr, nullptr};
  size_t strides[2] = {0, 0};
  for (Input& input : inputs_) {
    const auto type = static_cast<size_t>(input.kernel->row_type);
    if (found[type] == nullptr) found[type] = convert_rows(product, input.kernel->row_type, strides[type]);
    input.pointers.resize(product.num_rows);
    input.stride = strides[type];
    for (uint32_t row = 0; row < product.num_rows; ++row) input.pointers[row] = found[type] + row * strides[type];
    if (input.kernel->prepare_row == nullptr) continue;
    const PanelLayout& layout = input.plan->layout;
    const size_t bytes = row_stride(input.kernel->prepared_row_bytes(layout));
    input.prepared.grow(product.num_rows * bytes);
    const auto prepare = [&](uint32_t row) {
      input.kernel->prepare_row(layout, input.pointers[row], input.prepared.data() + row * bytes);
      input.pointers[row] = input.prepared.data() + row * bytes;
    };
    if (product.num_rows < kManyRows) {
      for (uint32_t row = 0; row < product.num_rows; ++row) prepare(row);
    } else {
      threads_->pool().parallel_for(product.num_rows, [&](uint32_t row, uint32_t) { prepare(row); });
    }
    input.stride = 0;
  }
}

void DenseMatrix::cut(const Product& product) {
  double total = 0.0;
  for (const Part& part : parts_) total += static_cast<double>(part.panels * part.plan->layout.panel_bytes);
  TaskCutter cutter(total, threads_->pool().size());
  tasks_.clear();
  for (uint32_t index = 0; index < parts_.size(); ++index) {
    const Part& part = parts_[index];
    const PanelLayout& layout = part.plan->layout;
    const size_t row_bytes = layout.k_padded * element_bytes(inputs_[part.input].kernel->row_type);
    const size_t result = kPanelColumns * sizeof(float) * rows_per_call(product.num_rows, row_bytes);
    const TaskUnit unit{static_cast<double>(layout.panel_bytes), layout.panel_bytes, result, kLeastTaskBytes,
                        most_task_bytes(product.num_rows * row_bytes), 1u};
    cutter.cut(part.panels, unit, [&](uint32_t panel, uint32_t count) { tasks_.push_back({index, panel, count}); });
  }
}

void DenseMatrix::run(const Task& task, const Product& product, uint32_t worker) {
  const Part& part = parts_[task.part];
  const PanelLayout& layout = part.plan->layout;
  const Input& input = inputs_[part.input];
  Scratch& scratch = threads_->scratch(worker);
  const uint32_t step = rows_per_call(product.num_rows, layout.k_padded * element_bytes(input.kernel->row_type));
  const size_t stride = size_t{kPanelColumns} * task.num_panels;
  for (uint32_t row = 0; row < product.num_rows; row += step) {
    const uint32_t count = std::min(step, product.num_rows - row);
    scratch.result.grow(count * stride * sizeof(float));
    scratch.gemm.grow(input.kernel->scratch_bytes(layout, task.num_panels, count));
    const GemmWork work{&layout, part.packed + task.panel * layout.panel_bytes, task.num_panels,
                        input.pointers.data() + row, input.stride, nullptr, count, scratch.result.as<float>(), stride,
                        scratch.gemm.data()};
    input.kernel->run(work);
    store(task, product, row, work);
  }
}

void DenseMatrix::store(const Task& task, const Product& product, uint32_t first_row, const GemmWork& work) const {
  const Part& part = parts_[task.part];
  const uint32_t first = task.panel * kPanelColumns;
  const uint32_t columns = std::min(task.num_panels * kPanelColumns, part.rows - first);
  const size_t begin = part.begin + first;
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    float* const result = work.result + row * work.result_stride;
    if (product.bias != nullptr) {
      for (uint32_t column = 0; column < columns; ++column) result[column] += product.bias[begin + column];
    }
    const size_t at = (first_row + row) * product.output_stride + begin;
    if (product.output_type == DType::kFloat32) {
      std::memcpy(static_cast<float*>(product.output) + at, result, columns * sizeof(float));
    } else {
      threads_->vectors().float32_to_bfloat16(result, static_cast<uint16_t*>(product.output) + at, columns);
    }
  }
}

void DenseMatrix::take_row(int64_t id, float* target) const {
  for (const Part& part : parts_) {
    const int64_t row = id - part.begin;
    if (row < 0 || row >= part.rows) continue;
    const PanelLayout& layout = part.plan->layout;
    const auto place = static_cast<uint32_t>(row);
    unpack_column(layout, part.packed + place / kPanelColumns * layout.panel_bytes, place % kPanelColumns, target);
    return;
  }
  std::fill_n(target, in_features_, 0.0f);
}

void DenseMatrix::take_rows(const int64_t* ids, uint32_t count, void* target, DType target_type) {
  const std::lock_guard<std::mutex> lock(threads_->call_mutex());
  threads_->pool().parallel_for(count, [&](uint32_t i, uint32_t worker) {
    if (target_type == DType::kFloat32) return take_row(ids[i], static_cast<float*>(target) + size_t{i} * in_features_);
    AlignedBuffer& row = threads_->scratch(worker).result;
    row.grow(in_features_ * sizeof(float));
    take_row(ids[i], row.as<float>());
    threads_->vectors().float32_to_bfloat16(row.as<float>(), static_cast<uint16_t*>(target) + size_t{i} * in_features_,
                                            in_features_);
  });
}

}  // namespace moebius::dense
