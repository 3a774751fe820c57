// Codes of 2, 3, 5 and 6 bits: vectors of bytes for all columns of a panel, 32 k at a time, then their bits in planes.
#include <tmmintrin.h>

#include <cstring>

#include "kernels/format/pack_lines.h"
#include "kernels/format/source_access.h"
#include "kernels/format/transpose_words.h"

namespace moebius {
namespace {

constexpr uint32_t kChunkK = 32;
constexpr uint32_t kVectors = 8;  // of a chunk

// A column's codes of a chunk, in the order of vectors.
void stage_codes(const SourceMatrix& source, uint32_t row, uint32_t k, uint8_t* staged) {
  alignas(16) uint8_t codes[kChunkK] = {};
  if (row < source.rows && source.col_stride == 1 && k + kChunkK <= source.cols) {
    const auto* const data = static_cast<const uint8_t*>(source.data);
    std::memcpy(codes, data + static_cast<ptrdiff_t>(row) * source.row_stride + k, kChunkK);
  } else if (row < source.rows) {
    for (uint32_t i = 0; i < kChunkK && k + i < source.cols; ++i) {
      codes[i] = static_cast<uint8_t>(source_code(source, row, k + i));
    }
  }
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  for (uint32_t half = 0; half < 2; ++half) {
    const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(codes + half * 16));
    _mm_store_si128(reinterpret_cast<__m128i*>(staged + half * 16), _mm_shuffle_epi8(bytes, order));
  }
}

// Bits first_bit ... first_bit + width - 1 of all vectors, to kVectors * width / 8 lines.
void put_plane(const uint8_t (*vectors)[64], uint32_t first_bit, uint32_t width, uint8_t* lines) {
  const uint32_t in_line = 8 / width;
  const auto mask = static_cast<uint8_t>((1U << width) - 1);
  for (uint32_t vector = 0; vector < kVectors; ++vector) {
    uint8_t* const line = lines + size_t{vector / in_line} * 64;
    const uint32_t shift = vector % in_line * width;
    for (uint32_t i = 0; i < 64; ++i) {
      const auto bits = static_cast<uint8_t>((vectors[vector][i] >> first_bit & mask) << shift);
      line[i] = shift == 0 ? bits : static_cast<uint8_t>(line[i] | bits);
    }
  }
}

}  // namespace

void pack_lines_planes(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                       std::byte* target) {
  const uint32_t bits = code_bits(layout.format.code);
  const uint32_t low_bits = bits < 4 ? 2 : 4;
  auto* to = reinterpret_cast<uint8_t*>(target);
  for (uint32_t line = lines.begin; line < lines.end; line += bits, to += size_t{bits} * 64) {
    alignas(64) uint8_t staged[kPanelColumns][kChunkK];
    alignas(64) uint8_t vectors[kVectors][64];
    const std::byte* rows[kPanelColumns];
    for (uint32_t column = 0; column < kPanelColumns; ++column) {
      stage_codes(source, lines.panel * kPanelColumns + column, line / bits * kChunkK, staged[column]);
      rows[column] = reinterpret_cast<const std::byte*>(staged[column]);
    }
    transpose_words(rows, kVectors, false, reinterpret_cast<std::byte*>(vectors));
    put_plane(vectors, 0, low_bits, to);
    if (bits > low_bits) put_plane(vectors, low_bits, bits - low_bits, to + size_t{low_bits} * 64);
  }
}

}  // namespace moebius
