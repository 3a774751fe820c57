// Single elements of a packed panel, literally as panel_layout.h says. Not for files built for one instruction set.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/format/numbers.h"
#include "kernels/format/panel_layout.h"

namespace moebius {

// The bits of a code, in the low bits. k < k_padded.
inline uint32_t panel_code(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t k) {
  const uint32_t bits = code_bits(layout.format.code);
  const uint32_t per_word = 32 / bits;
  const uint32_t word = load_element<uint32_t>(panel, k / per_word * kPanelColumns + column);
  if (bits == 32) return word;
  const uint32_t i = k % per_word;
  const uint32_t shift = bits == 4 ? i % 2 * 16 + i / 2 * 4 : i * bits;
  return word >> shift & ((1U << bits) - 1);
}

// The zero point of group and column `entry` = group * 16 + column.
inline uint32_t panel_zero(const PanelLayout& layout, const std::byte* panel, size_t entry) {
  if (layout.format.zeros) return load_element<uint8_t>(panel + layout.zeros_offset, static_cast<ptrdiff_t>(entry));
  return layout.format.mins ? 0 : 8;
}

// What a code means before its scales; zero: of kInt4.
inline float decode_value(Code code, uint32_t bits, uint32_t zero) {
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

}  // namespace moebius
