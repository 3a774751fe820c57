// The GEMMs as a reference: the order of operations that every other level is measured against.
#include "kernels/format/panel_values.h"
#include "kernels/gemm/gemm.h"
#include "kernels/isa/isa.h"

namespace moebius {
namespace {

// Group scales, mins and codes of a panel as float32: scales[groups][16] (one group of ones without any),
// mins[groups][16] (zeros without any), then values[k_padded][16]. Zero points are already subtracted.
struct DecodedPanel {
  uint32_t groups;
  uint32_t group_size;
  float* scales;
  float* mins;
  float* values;
};

uint32_t decoded_groups(const PanelLayout& layout) { return layout.groups == 0 ? 1 : layout.groups; }

DecodedPanel decode_panel(const PanelLayout& layout, const std::byte* panel, std::byte* scratch) {
  const WeightFormat& format = layout.format;
  DecodedPanel decoded{};
  decoded.groups = decoded_groups(layout);
  decoded.group_size = layout.groups == 0 ? layout.k_padded : format.group_size;
  decoded.scales = reinterpret_cast<float*>(scratch);
  decoded.mins = decoded.scales + size_t{decoded.groups} * kPanelColumns;
  decoded.values = decoded.mins + size_t{decoded.groups} * kPanelColumns;
  for (uint32_t entry = 0; entry < decoded.groups * kPanelColumns; ++entry) {
    const uint32_t index = format.panel_scale ? entry / kPanelColumns : entry;
    decoded.scales[entry] = panel_scale(layout, panel, false, index);
    decoded.mins[entry] = format.mins ? panel_scale(layout, panel, true, entry) : 0.0f;
  }
  for (uint32_t k = 0; k < layout.k; ++k) {
    for (uint32_t column = 0; column < kPanelColumns; ++column) {
      const size_t entry = size_t{k / decoded.group_size} * kPanelColumns + column;
      decoded.values[size_t{k} * kPanelColumns + column] =
          panel_value(layout, panel, column, k, entry);
    }
  }
  return decoded;
}

// result[16] = column_scale * sum over groups of scale * sum over k (+ bias)
void finish_columns(const PanelLayout& layout, const std::byte* panel, const float* sums, float row_scale,
                    float* result) {
  for (uint32_t column = 0; column < kPanelColumns; ++column) {
    const std::byte* const scales = panel + layout.column_scale_offset;
    const float scale = layout.format.column_scale ? load_element<float>(scales, column) : 1.0f;
    const float bias = layout.has_bias ? load_element<float>(panel + layout.bias_offset, column) : 0.0f;
    result[column] = sums[column] * (scale * row_scale) + bias;
  }
}

void multiply_row(const PanelLayout& layout, const DecodedPanel& decoded, const float* row, float* sums) {
  for (uint32_t column = 0; column < kPanelColumns; ++column) sums[column] = 0.0f;
  for (uint32_t group = 0; group < decoded.groups; ++group) {
    const uint32_t begin = group * decoded.group_size;
    const uint32_t end = begin + decoded.group_size < layout.k ? begin + decoded.group_size : layout.k;
    float partial[kPanelColumns] = {};
    float row_sum = 0.0f;  // what mins are multiplied with
    for (uint32_t k = begin; k < end; ++k) {
      row_sum += row[k];
      const float* values = decoded.values + size_t{k} * kPanelColumns;
      for (uint32_t column = 0; column < kPanelColumns; ++column) partial[column] += row[k] * values[column];
    }
    const float* scales = decoded.scales + size_t{group} * kPanelColumns;
    for (uint32_t column = 0; column < kPanelColumns; ++column) sums[column] += scales[column] * partial[column];
    if (!layout.format.mins) continue;  // zero times infinity is not zero
    const float* mins = decoded.mins + size_t{group} * kPanelColumns;
    for (uint32_t column = 0; column < kPanelColumns; ++column) sums[column] += mins[column] * row_sum;
  }
}

void run_float32(const GemmWork& work) {
  const PanelLayout& layout = *work.layout;
  for (uint32_t i = 0; i < work.num_panels; ++i) {
    const std::byte* panel = work.panels + i * layout.panel_bytes;
    const DecodedPanel decoded = decode_panel(layout, panel, work.scratch);
    for (uint32_t row = 0; row < work.num_rows; ++row) {
      float sums[kPanelColumns];
      multiply_row(layout, decoded, static_cast<const float*>(work.rows[row]), sums);
      finish_columns(layout, panel, sums, 1.0f, work.result + row * work.result_stride + size_t{i} * kPanelColumns);
    }
  }
}

// |sum| stays below 2^31 for k up to 2^17.
void run_int8(const GemmWork& work) {
  const PanelLayout& layout = *work.layout;
  for (uint32_t i = 0; i < work.num_panels; ++i) {
    const std::byte* panel = work.panels + i * layout.panel_bytes;
    for (uint32_t row = 0; row < work.num_rows; ++row) {
      const auto* elements = static_cast<const int8_t*>(work.rows[row]);
      float sums[kPanelColumns];
      for (uint32_t column = 0; column < kPanelColumns; ++column) {
        int32_t sum = 0;
        for (uint32_t k = 0; k < layout.k; ++k) {
          sum += elements[k] * static_cast<int8_t>(panel_code(layout, panel, column, k));
        }
        sums[column] = static_cast<float>(sum);
      }
      finish_columns(layout, panel, sums, work.row_scales[row],
                     work.result + row * work.result_stride + size_t{i} * kPanelColumns);
    }
  }
}

bool supports_float32(const WeightFormat& format) { return !format.quantised_rows; }

bool supports_int8(const WeightFormat& format) {
  return format.code == Code::kInt8 && format.quantised_rows && format.column_scale && format.group_size == 0;
}

size_t scratch_float32(const PanelLayout& layout, uint32_t, uint32_t) {
  return (size_t{layout.k_padded} + 2 * size_t{decoded_groups(layout)}) * kPanelColumns * sizeof(float);
}

size_t scratch_none(const PanelLayout&, uint32_t, uint32_t) { return 0; }

constexpr GemmKernel kFloat32{"scalar_float32", Isa::kScalar, RowType::kFloat32, 0, 0,
                                 supports_float32, scratch_float32, run_float32};
constexpr GemmKernel kInt8{"scalar_int8", Isa::kScalar, RowType::kInt8, 0, 0,
                              supports_int8, scratch_none, run_int8};
constexpr const GemmKernel* kKernels[] = {&kFloat32, &kInt8};

}  // namespace

GemmKernels gemms_scalar() { return {kKernels, 2}; }

}  // namespace moebius
