#include "kernels/format/unpack.h"

#include "kernels/format/source_access.h"

namespace moebius {
namespace {

uint32_t panel_code(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t k) {
  const uint32_t bits = code_bits(layout.format.code);
  const uint32_t per_word = 32 / bits;
  const uint32_t word = load_element<uint32_t>(panel, k / per_word * kPanelColumns + column);
  if (bits == 32) return word;
  const uint32_t i = k % per_word;
  const uint32_t shift = bits == 4 ? i % 2 * 16 + i / 2 * 4 : i * bits;
  return word >> shift & ((1U << bits) - 1);
}

float value(Code code, uint32_t bits, uint32_t zero) {
  switch (code) {
    case Code::kFloat32: return std::bit_cast<float>(bits);
    case Code::kBFloat16: return decode_bfloat16(static_cast<uint16_t>(bits));
    case Code::kFloat16: return decode_float16(static_cast<uint16_t>(bits));
    case Code::kFloat8: return kFloat8Values[bits];
    case Code::kInt8: return static_cast<float>(static_cast<int8_t>(bits));
    case Code::kInt4: return static_cast<float>(static_cast<int32_t>(bits) - static_cast<int32_t>(zero));
    case Code::kFloat4: return kFloat4Values[bits];
  }
  return 0.0f;
}

}  // namespace

void unpack_panel(const PanelLayout& layout, const std::byte* panel, float* weights, float* bias) {
  const WeightFormat& format = layout.format;
  for (uint32_t column = 0; column < kPanelColumns; ++column) {
    const std::byte* column_scales = panel + layout.column_scale_offset;
    const float column_scale = format.column_scale ? load_element<float>(column_scales, column) : 1.0f;
    for (uint32_t k = 0; k < layout.k; ++k) {
      const uint32_t group = layout.groups == 0 ? 0 : k / format.group_size;
      const uint32_t entry = group * kPanelColumns + column;
      const uint32_t zero = format.zeros ? load_element<uint8_t>(panel + layout.zeros_offset, entry) : 8;
      const float group_scale =
          load_scale(format.scale, panel + layout.scales_offset, format.panel_scale ? group : entry);
      const float decoded = value(format.code, panel_code(layout, panel, column, k), zero);
      weights[size_t{column} * layout.k + k] = decoded * group_scale * column_scale;
    }
    if (bias == nullptr) continue;
    bias[column] = layout.has_bias ? load_element<float>(panel + layout.bias_offset, column) : 0.0f;
  }
}

}  // namespace moebius
