// 32-bit transposes and nibble orders of the packed layout, in SSE of the baseline: four rows' cache lines at a
// time are read whole, so packing runs at the speed of memory without a file per instruction set.
#pragma once

#include <emmintrin.h>
#include <tmmintrin.h>

#include <cstddef>
#include <cstdint>

namespace moebius {

// rows[c] points to at least 4 * num_lines bytes; line i of target is word i of every row. num_lines <= 16, a
// multiple of 4. `nibbles`: every word is reordered from k..k+7 to the even k in its low half.
void transpose_words(const std::byte* const rows[16], uint32_t num_lines, bool nibbles, std::byte* target);

// Nibbles 0 1 2 3 4 5 6 7 -> 0 2 4 6 1 3 5 7 of every word.
inline __m128i even_nibbles_first(__m128i words) {
  const __m128i middle = _mm_and_si128(_mm_xor_si128(words, _mm_srli_epi32(words, 4)), _mm_set1_epi32(0x00f000f0));
  words = _mm_xor_si128(words, _mm_xor_si128(middle, _mm_slli_epi32(middle, 4)));
  return _mm_shuffle_epi8(words, _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
}

struct Words4x4 {
  __m128i row[4];
};

inline Words4x4 transposed(const Words4x4& a) {
  const __m128i low01 = _mm_unpacklo_epi32(a.row[0], a.row[1]);
  const __m128i low23 = _mm_unpacklo_epi32(a.row[2], a.row[3]);
  const __m128i high01 = _mm_unpackhi_epi32(a.row[0], a.row[1]);
  const __m128i high23 = _mm_unpackhi_epi32(a.row[2], a.row[3]);
  return {{_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23), _mm_unpacklo_epi64(high01, high23),
           _mm_unpackhi_epi64(high01, high23)}};
}

}  // namespace moebius
