// Single elements of a packed panel, literally as panel_layout.h says. Not for files built for one instruction set.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/format/codebooks.h"
#include "kernels/format/grids.h"
#include "kernels/format/numbers.h"
#include "kernels/format/panel_layout.h"

namespace moebius {

// Of codes of 2, 3, 5 and 6 bits: the planes of 32 k.
inline uint32_t plane_code(uint32_t bits, const std::byte* panel, uint32_t column, uint32_t k) {
  const uint32_t low_bits = bits < 4 ? 2 : 4;
  const uint32_t high_bits = bits - low_bits;
  const uint32_t vector = k % 32 / 8 * 2 + k / 2 % 2;
  const uint32_t byte = k % 8 / 4 + k % 2 * 2;
  const std::byte* const planes = panel + size_t{k / 32} * bits * 64 + column * 4 + byte;
  // Vectors of `width` bits: as many to a line as fit into a byte.
  const auto field = [&](uint32_t line, uint32_t width) {
    const uint32_t in_line = 8 / width;
    const auto held = static_cast<uint32_t>(planes[size_t{line + vector / in_line} * 64]);
    return held >> (vector % in_line * width) & ((1U << width) - 1);
  };
  const uint32_t low = field(0, low_bits);
  return high_bits == 0 ? low : low | field(low_bits, high_bits) << low_bits;
}

// The bits of a code, in the low bits. k < k_padded.
inline uint32_t panel_code(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t k) {
  const uint32_t bits = code_bits(layout.format.code);
  if (bits < 8 && bits != 4) return plane_code(bits, panel, column, k);
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
  return layout.format.mins ? 0 : code_middle(layout.format.code);
}

// What a code means before its scales; zero: of kInt2 to kInt6.
inline float decode_value(Code code, uint32_t bits, uint32_t zero) {
  switch (code) {
    case Code::kFloat32: return std::bit_cast<float>(bits);
    case Code::kBFloat16: return decode_bfloat16(static_cast<uint16_t>(bits));
    case Code::kFloat16: return decode_float16(static_cast<uint16_t>(bits));
    case Code::kFloat8: return kFloat8Values[bits];
    case Code::kInt8: return static_cast<float>(static_cast<int8_t>(bits));
    case Code::kInt2:
    case Code::kInt3:
    case Code::kInt4:
    case Code::kInt5:
    case Code::kInt6: return static_cast<float>(static_cast<int32_t>(bits) - static_cast<int32_t>(zero));
    case Code::kFloat4: return kFloat4Values[bits];
    case Code::kIq3Xxs:
    case Code::kIq3S:
    case Code::kIq2Xxs:
    case Code::kIq2Xs:
    case Code::kIq2S:
    case Code::kIq1S:
    case Code::kIq1M:
    case Code::kTq1: break;  // see grid_value
    case Code::kIq4: {
      const Codebook& book = *kCodebooks[static_cast<int>(code) - static_cast<int>(Code::kIq4)];
      return static_cast<float>(book.values[bits]) * book.unit;
    }
  }
  return 0.0f;
}

// The number of a row of a grid, and signs of the eight k that k is one of.
struct GridPlace {
  uint32_t number;
  uint32_t signs;
};

inline uint32_t with_even_ones(uint32_t stored) {
  return stored | (static_cast<uint32_t>(std::popcount(stored)) & 1) << 7;
}

// Of k of 32 whose words are words[0], words[step], ..., `more` where signs have a byte.
inline GridPlace grid_place(Code code, const uint32_t* words, size_t step, uint32_t more, uint32_t i) {
  const auto stored_signs = [i](uint32_t word) { return with_even_ones(word >> (i / 8 * 7) & 127); };
  const uint32_t pair = words[i / 16 * step] >> (i % 16 / 8 * 16);
  switch (code) {
    case Code::kIq3Xxs:
      return {words[i / 16 * step] >> (i % 16 / 4 * 8) & 255, stored_signs(words[2 * step])};
    case Code::kIq2Xxs: return {words[0] >> (i / 8 * 8) & 255, stored_signs(words[step])};
    case Code::kIq2Xs: return {pair & 511, with_even_ones(pair >> 9 & 127)};
    case Code::kIq2S: return {pair & 1023, (pair >> 10 & 63) | (more >> (i / 8 * 2) & 3) << 6};
    case Code::kIq1S:
    case Code::kIq1M: {
      // Of 16 k two numbers: 11 bits of one and 5 of the other, then in a byte 6 bits. Above these of iq1_m whether
      // values are an eighth less, of iq1_s two bits of s, then its third and the same of all.
      const uint32_t byte = more >> (i / 16 * 8) & 255;
      const bool less = (code == Code::kIq1S ? more >> 15 : byte >> (6 + i / 8 % 2)) & 1;
      const uint32_t half = words[0] >> (i / 16 * 16) & 0xffff;
      return {i % 16 < 8 ? half & 2047 : half >> 11 | (byte & 63) << 5, less ? 255U : 0U};
    }
    default: break;
  }
  // iq3_s
  constexpr uint32_t kPlaces[] = {0, 10, 23};
  const uint32_t half = i / 16, row = i % 16 / 4, own = words[half * 2 * step], shared = words[step];
  const uint32_t number = (row < 3 ? own >> kPlaces[row] : shared >> (half * 23)) & 511;
  const uint32_t signs = (more >> (half * 4) & 15) | (shared >> (9 + half * 7) & 127) << 4 |
                         (own >> 19 & 15) << 11 | (own >> 9 & 1) << 15;
  return {number, signs >> (i % 16 / 8 * 8) & 255};
}

// A digit to the base of 3, of a column's word and what the signs' section has: 16 bits, then 4. Bytes are 256 / 243 times
// whole numbers, rounded, so that a third of a byte's range tells its first digit, and the rest times 3 is the next one's.
// Digits 0 to 19 are four bytes' first ones, then their second ones, ...; 20 to 29 likewise two bytes'. The last two have
// two bits each.
inline int trit(uint32_t word, uint32_t more, uint32_t i) {
  constexpr uint32_t kPowers[] = {1, 3, 9, 27, 81, 64};
  const uint32_t held = i < 20 ? word >> (i % 4 * 8) : more >> (i < 30 ? i % 2 * 8 : i * 2 - 44);
  const auto byte = static_cast<int8_t>(held * kPowers[i < 20 ? i / 4 : (i - 20) / 2]);
  return (byte > 42 ? 1 : 0) - (byte < -42 ? 1 : 0);
}

// What k of the 32 means before its scale.
inline float grid_value(Code code, const uint32_t* words, size_t step, uint32_t more, uint32_t k) {
  const uint32_t i = k % 32;
  if (code == Code::kTq1) return static_cast<float>(trit(words[0], more, i));
  const GridPlace place = grid_place(code, words, step, more, i);
  const GridRows rows = grid_rows(code);
  const auto* const row = static_cast<const uint8_t*>(rows.rows) + size_t{place.number} * rows.width;
  if (is_iq1(code)) return static_cast<float>(static_cast<int8_t>(row[i % 8]) + (place.signs != 0 ? -1 : 1)) * rows.unit;
  const float value = static_cast<float>(row[i % rows.width]) * rows.unit;
  return (place.signs >> (i % 8) & 1) != 0 ? -value : value;
}

// The first word of a column's 32 k; the next ones are kPanelColumns on.
inline const uint32_t* grid_words(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t k) {
  const size_t lines = size_t{k / 32} * code_bits(layout.format.code);
  return reinterpret_cast<const uint32_t*>(panel) + lines * kPanelColumns + column;
}

// What the section of signs has for them.
inline uint32_t grid_signs(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t k) {
  const auto entry = static_cast<ptrdiff_t>(size_t{k / 32} * kPanelColumns + column);
  const std::byte* const signs = panel + layout.signs_offset;
  if (layout.format.code == Code::kTq1) {
    const auto both = load_element<uint8_t>(signs + layout.k_padded, entry / 32 * 16 + entry % 16);
    return load_element<uint16_t>(signs, entry) | (both >> (entry / 16 % 2 * 4) & 15U) << 16;
  }
  switch (sign_bytes(layout.format.code)) {
    case 1: return load_element<uint8_t>(signs, entry);
    case 2: return load_element<uint16_t>(signs, entry);
    default: return 0;
  }
}

// The s of iq1_s, in what a column's 32 k have in the section of signs.
inline uint32_t iq1_s_scale(uint32_t signs) { return (signs >> 6 & 3) | (signs >> 12 & 4); }

// What element k of a column means before its scales, of group and column `entry`.
inline float panel_value(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t k, size_t entry) {
  const Code code = layout.format.code;
  if (is_grid(code)) {
    return grid_value(code, grid_words(layout, panel, column, k), kPanelColumns, grid_signs(layout, panel, column, k), k);
  }
  return decode_value(code, panel_code(layout, panel, column, k), panel_zero(layout, panel, entry));
}

// Element `entry` of a panel's group scales, or of its mins.
inline float panel_scale(const PanelLayout& layout, const std::byte* panel, bool of_mins, size_t entry) {
  const auto index = static_cast<ptrdiff_t>(entry);
  const std::byte* const section = panel + (of_mins ? layout.mins_offset : layout.scales_offset);
  if (layout.format.scale != ScaleType::kProducts) return load_scale(layout.format.scale, section, index);
  const size_t place = entry / kPanelColumns / layout.factor_groups * kPanelColumns + entry % kPanelColumns;
  const float factor = decode_float16(load_element<uint16_t>(section, static_cast<ptrdiff_t>(place)));
  if (layout.whole_low_bits != 0) {
    const auto field = [&](size_t offset, uint32_t bits) {
      const size_t bit = entry / kPanelColumns * bits;
      const std::byte held = section[offset + bit / 8 * kPanelColumns + entry % kPanelColumns];
      return static_cast<int>(std::to_integer<uint32_t>(held) >> bit % 8 & ((1U << bits) - 1));
    };
    int whole = field(layout.whole_offset, layout.whole_low_bits);
    if (layout.whole_high_bits != 0) {
      whole |= field(layout.whole_high_offset, layout.whole_high_bits) << layout.whole_low_bits;
    }
    const int middle = 1 << (layout.whole_low_bits + layout.whole_high_bits - 1);
    return factor * static_cast<float>(is_grid(layout.format.code) ? whole * 2 + 1 : whole - middle);
  }
  if (is_grid(layout.format.code)) {
    if (layout.format.code == Code::kTq1) return factor;
    const auto column = static_cast<uint32_t>(entry % kPanelColumns);
    const auto k = static_cast<uint32_t>(entry / kPanelColumns * 32);
    if (layout.format.code == Code::kIq1S) {
      return factor * static_cast<float>(iq1_s_scale(grid_signs(layout, panel, column, k)) * 2 + 1);
    }
    const size_t last = (code_bits(layout.format.code) - 1) * kPanelColumns;
    return factor * static_cast<float>((grid_words(layout, panel, column, k)[last] >> 28) * 2 + 1);
  }
  if (!layout.joined) return factor * static_cast<float>(load_element<int8_t>(section + layout.whole_offset, index));
  const auto both = load_element<uint8_t>(panel + layout.scales_offset + layout.whole_offset, index);
  return factor * static_cast<float>(of_mins ? both >> 4 : both & 15);
}

}  // namespace moebius
