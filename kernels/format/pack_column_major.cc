// Sources whose columns run along memory: a line of the panel is read from one to eight neighbouring source rows.
#include <algorithm>
#include <cstring>

#include "kernels/format/pack_lines.h"
#include "kernels/format/source_access.h"
#include "kernels/format/transpose_words.h"

namespace moebius {
namespace {

// Lines that a loop over whole panels may take: none of a ragged panel.
uint32_t whole_lines(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines) {
  if ((uint64_t{lines.panel} + 1) * kPanelColumns > source.rows) return lines.begin;
  return std::clamp(source.cols / (32 / code_bits(layout.format.code)), lines.begin, lines.end);
}

const std::byte* panel_begin(const SourceMatrix& source, uint32_t panel, uint32_t columns_per_unit) {
  return static_cast<const std::byte*>(source.data) +
         size_t{panel} * kPanelColumns / columns_per_unit * source_unit_bytes(source);
}

// Bytes between elements of neighbouring k and of neighbouring columns.
struct Strides {
  ptrdiff_t k;
  ptrdiff_t column;
};

// One line from 4 / sizeof(T) rows of elements: element `column` of row i to byte i * sizeof(T) of word `column`.
template <class T, bool kAdjacentColumns>
void pack_strided_lines(const std::byte* source, Strides stride, uint32_t num_lines, std::byte* target) {
  constexpr uint32_t kPerWord = 4 / sizeof(T);
  for (uint32_t line = 0; line < num_lines; ++line) {
    alignas(64) T elements[kPerWord][kPanelColumns];
    for (uint32_t i = 0; i < kPerWord; ++i, source += stride.k) {
      if constexpr (kAdjacentColumns) {
        std::memcpy(elements[i], source, sizeof(elements[i]));
      } else {
        for (uint32_t column = 0; column < kPanelColumns; ++column) {
          std::memcpy(&elements[i][column], source + column * stride.column, sizeof(T));
        }
      }
    }
    alignas(64) uint32_t words[kPanelColumns];
    for (uint32_t column = 0; column < kPanelColumns; ++column) {
      uint32_t word = 0;
      for (uint32_t i = 0; i < kPerWord; ++i) word |= uint32_t{elements[i][column]} << (i * 8 * sizeof(T) % 32);
      words[column] = word;
    }
    std::memcpy(target + size_t{line} * 64, words, 64);
  }
}

template <class T>
void pack_elements(const std::byte* source, Strides stride, uint32_t num_lines, std::byte* target) {
  if (stride.column == sizeof(T)) return pack_strided_lines<T, true>(source, stride, num_lines, target);
  pack_strided_lines<T, false>(source, stride, num_lines, target);
}

// Rows i and i + 4 of a 8 x 8 block of nibbles and so on, in three steps of halving blocks, in every 32-bit lane:
// afterwards nibble i of word j is what nibble j of word i was.
void transpose_nibbles(__m128i words[8]) {
  const auto exchange = [words](int a, int b, int shift, __m128i mask) {
    const __m128i difference = _mm_and_si128(_mm_xor_si128(_mm_srli_epi32(words[a], shift), words[b]), mask);
    words[b] = _mm_xor_si128(words[b], difference);
    words[a] = _mm_xor_si128(words[a], _mm_slli_epi32(difference, shift));
  };
  for (int i = 0; i < 4; ++i) exchange(i, i + 4, 16, _mm_set1_epi32(0x0000ffff));
  for (int i = 0; i < 8; i += 4) {
    exchange(i, i + 2, 8, _mm_set1_epi32(0x00ff00ff));
    exchange(i + 1, i + 3, 8, _mm_set1_epi32(0x00ff00ff));
  }
  for (int i = 0; i < 8; i += 2) exchange(i, i + 1, 4, _mm_set1_epi32(0x0f0f0f0f));
}

// Two lines: 16 rows of two words of eight columns.
void pack_awq_lines(const std::byte* source, ptrdiff_t stride, std::byte* target) {
  constexpr int kPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // of row k + i among a panel word's nibbles
  __m128i words[8];
  for (int i = 0; i < 8; ++i) {
    const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source + i * stride));
    const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source + (i + 8) * stride));
    words[kPlaces[i]] = _mm_unpacklo_epi64(first, second);
  }
  transpose_nibbles(words);
  for (uint32_t half = 0; half < 2; ++half) {
    Words4x4 columns;
    for (uint32_t i = 0; i < 4; ++i) columns.row[i] = words[kAwqNibbles[half * 4 + i]];
    columns = transposed(columns);
    for (uint32_t i = 0; i < 4; ++i) {  // line i / 2, source word i % 2
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i / 2 * 64 + i % 2 * 32 + half * 16), columns.row[i]);
    }
  }
}

}  // namespace

void pack_lines_awq(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines, std::byte* target) {
  const ptrdiff_t stride = source.row_stride * 4;
  const uint32_t whole = whole_lines(source, layout, lines);
  const std::byte* begin = panel_begin(source, lines.panel, 8);
  uint32_t line = lines.begin;
  for (; line + 2 <= whole; line += 2, target += 128) pack_awq_lines(begin + line * 8 * stride, stride, target);
  pack_lines_reference(source, layout, {lines.panel, line, lines.end}, target);
}

void pack_lines_gptq(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines, std::byte* target) {
  const uint32_t whole = whole_lines(source, layout, lines);
  const std::byte* words = panel_begin(source, lines.panel, 1) + lines.begin * source.row_stride * 4;
  for (uint32_t line = lines.begin; line < whole; ++line, words += source.row_stride * 4, target += 64) {
    for (uint32_t i = 0; i < 64; i += 16) {
      const __m128i stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), even_nibbles_first(stored));
    }
  }
  pack_lines_reference(source, layout, {lines.panel, whole, lines.end}, target);
}

void pack_lines_strided(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                        std::byte* target) {
  const uint32_t bits = code_bits(layout.format.code);
  const auto bytes = static_cast<ptrdiff_t>(bits / 8);
  const Strides stride{source.col_stride * bytes, source.row_stride * bytes};
  const uint32_t whole = whole_lines(source, layout, lines);
  const std::byte* begin = static_cast<const std::byte*>(source.data) +
                           static_cast<ptrdiff_t>(lines.panel * kPanelColumns) * stride.column +
                           static_cast<ptrdiff_t>(lines.begin * (32 / bits)) * stride.k;
  const uint32_t count = whole - lines.begin;
  if (bits == 32) pack_elements<uint32_t>(begin, stride, count, target);
  if (bits == 16) pack_elements<uint16_t>(begin, stride, count, target);
  if (bits == 8) pack_elements<uint8_t>(begin, stride, count, target);
  pack_lines_reference(source, layout, {lines.panel, whole, lines.end}, target + size_t{count} * 64);
}

}  // namespace moebius
