#include "kernels/format/requantise.h"

#include <xmmintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "kernels/format/dequantise.h"
#include "kernels/format/numbers.h"
#include "kernels/format/requantise_kernels.h"
#include "kernels/isa/isa.h"

namespace moebius {
namespace {

constexpr uint32_t kColumns = kPanelColumns;
// Rows this far apart do not fall into the same sets of a first-level cache, as rows of 2^n floats would.
constexpr uint32_t kRowPadding = 16;

const RequantiseKernels& requantise_kernels() {
  static const RequantiseKernels& chosen = [](Isa isa) -> const RequantiseKernels& {
    if (isa >= Isa::kAvx512) return requantise_avx512();
    return isa >= Isa::kAvx2 ? requantise_avx2() : requantise_scalar();
  }(resolve_isa("auto"));
  return chosen;
}

// What a thread needs for one panel; kept between panels.
struct Scratch {
  std::vector<float> rows;     // [16][k_padded + kRowPadding]
  std::vector<float> storage;  // panel and scales, aligned below
  std::vector<uint8_t> zeros;
  float* panel = nullptr;      // [k_padded][16], 64-byte aligned
  float* scales = nullptr;     // [max(groups, 1)][16], 64-byte aligned

  void prepare(const PanelLayout& layout) {
    const size_t scale_rows = std::max(layout.groups, 1u);
    rows.resize(static_cast<size_t>(kColumns) * (layout.k_padded + kRowPadding));
    storage.resize(kColumns * (layout.k_padded + scale_rows) + 16);
    zeros.resize(kColumns * scale_rows);
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    panel = storage.data() + (64 - address % 64) % 64 / sizeof(float);
    scales = panel + static_cast<size_t>(kColumns) * layout.k_padded;
  }
};

// [16][stride] to [k_padded][16].
void transpose(const float* rows, size_t stride, uint32_t k_padded, float* panel) {
  for (uint32_t k = 0; k < k_padded; k += 4) {
    for (uint32_t column = 0; column < kColumns; column += 4) {
      const float* source = rows + column * stride + k;
      __m128 a = _mm_loadu_ps(source), b = _mm_loadu_ps(source + stride);
      __m128 c = _mm_loadu_ps(source + 2 * stride), d = _mm_loadu_ps(source + 3 * stride);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      float* target = panel + static_cast<size_t>(kColumns) * k + column;
      _mm_store_ps(target, a);
      _mm_store_ps(target + kColumns, b);
      _mm_store_ps(target + 2 * kColumns, c);
      _mm_store_ps(target + 3 * kColumns, d);
    }
  }
}

void gather(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, Scratch& scratch) {
  const size_t stride = layout.k_padded + kRowPadding;
  for (uint32_t column = 0; column < kColumns; ++column) {
    float* row = scratch.rows.data() + column * stride;
    const uint32_t index = panel * kColumns + column;
    uint32_t filled = 0;
    if (index < source.rows) {
      dequantise_row(source, index, row);
      filled = layout.k;
    }
    std::fill(row + filled, row + layout.k_padded, 0.0f);
  }
  transpose(scratch.rows.data(), stride, layout.k_padded, scratch.panel);
}

void write_codes(const WeightFormat& format, const RequantiseWork& work) {
  const RequantiseKernels& kernels = requantise_kernels();
  switch (format.code) {
    case Code::kFloat32:
      std::memcpy(work.codes, work.weights, sizeof(float) * kColumns * work.k_padded);
      return;
    case Code::kBFloat16:
      return kernels.to_bfloat16(work);
    case Code::kFloat16:
      return kernels.to_float16(work);
    case Code::kInt8:
      return kernels.to_int8(work);
    default:
      return format.zeros ? kernels.to_int4_zeros(work) : kernels.to_int4(work);
  }
}

// Exact: the loops have rounded the value to the type.
uint16_t half_bits(float value, ScaleType type) {
  if (type == ScaleType::kFloat16) return encode_float16(value);
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

void write_scales(const PanelLayout& layout, const Scratch& scratch, std::byte* target) {
  if (layout.format.column_scale) {
    std::memcpy(target + layout.column_scale_offset, scratch.scales, sizeof(float) * kColumns);
    return;
  }
  const size_t count = static_cast<size_t>(kColumns) * layout.groups;
  if (layout.format.scale == ScaleType::kFloat32) {
    std::memcpy(target + layout.scales_offset, scratch.scales, sizeof(float) * count);
    return;
  }
  auto* halves = reinterpret_cast<uint16_t*>(target + layout.scales_offset);
  for (size_t i = 0; i < count; ++i) halves[i] = half_bits(scratch.scales[i], layout.format.scale);
  if (layout.format.zeros) std::memcpy(target + layout.zeros_offset, scratch.zeros.data(), count);
}

void write_bias(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target) {
  float bias[kColumns] = {};
  for (uint32_t column = 0; column < kColumns && source.bias != nullptr; ++column) {
    if (panel * kColumns + column < source.rows) bias[column] = source.bias[panel * kColumns + column];
  }
  std::memcpy(target + layout.bias_offset, bias, sizeof bias);
}

}  // namespace

bool can_requantise_to(const WeightFormat& format) {
  if (format.panel_scale || format.mins) return false;
  const bool half_scales = format.scale == ScaleType::kFloat32 || format.scale == ScaleType::kBFloat16 ||
                           format.scale == ScaleType::kFloat16;
  switch (format.code) {
    case Code::kFloat32:
    case Code::kBFloat16:
    case Code::kFloat16:
      return format.scale == ScaleType::kNone && !format.column_scale;
    case Code::kInt8:
      return format.scale == ScaleType::kNone && format.column_scale;
    case Code::kInt4:
      return half_scales && format.group_size % 8 == 0 && format.group_size != 0 && !format.column_scale;
    default:
      return false;
  }
}

PackError requantise_panel(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel,
                           std::byte* target) {
  if (!can_requantise_to(layout.format)) {
    throw std::invalid_argument("weights can not be requantised to " + weight_format_name(layout.format) +
                                "; allowed: float32, bfloat16, float16, int8 and int4 formats");
  }
  if (source.cols != layout.k) {
    throw std::invalid_argument("the source has " + std::to_string(source.cols) + " columns, the panel " +
                                std::to_string(layout.k));
  }
  thread_local Scratch scratch;
  scratch.prepare(layout);
  gather(source, layout, panel, scratch);
  std::memset(target + layout.scales_offset, 0, layout.panel_bytes - layout.scales_offset);
  double squared_error[kColumns] = {}, squared[kColumns] = {};
  const RequantiseWork work{scratch.panel,
                            layout.k,
                            layout.k_padded,
                            layout.format.group_size,
                            layout.format.scale,
                            target,
                            scratch.scales,
                            layout.format.zeros ? scratch.zeros.data() : nullptr,
                            squared_error};
  write_codes(layout.format, work);
  requantise_kernels().sum_squares(scratch.panel, layout.k, squared);
  if (layout.format.code == Code::kInt8 || layout.format.code == Code::kInt4) write_scales(layout, scratch, target);
  if (layout.has_bias) write_bias(source, layout, panel, target);
  PackError error;
  for (uint32_t column = 0; column < kColumns; ++column) {
    error.squared_error += squared_error[column];
    error.squared_reference += squared[column];
  }
  const double sum = error.squared_error + error.squared_reference;
  if (!(sum <= std::numeric_limits<double>::max())) {
    error.squared_error = error.squared_reference = std::numeric_limits<double>::quiet_NaN();
  }
  return error;
}

}  // namespace moebius
