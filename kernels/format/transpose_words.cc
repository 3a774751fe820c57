#include "kernels/format/transpose_words.h"

namespace moebius {
namespace {

template <bool kNibbles>
void transpose(const std::byte* const rows[16], uint32_t num_lines, std::byte* target) {
  for (uint32_t column = 0; column < 16; column += 4) {
    for (uint32_t line = 0; line < num_lines; line += 4) {
      Words4x4 words;
      for (uint32_t i = 0; i < 4; ++i) {
        words.row[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[column + i] + size_t{line} * 4));
        if constexpr (kNibbles) words.row[i] = even_nibbles_first(words.row[i]);
      }
      words = transposed(words);
      for (uint32_t i = 0; i < 4; ++i) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target + size_t{line + i} * 64 + column * 4), words.row[i]);
      }
    }
  }
}

}  // namespace

void transpose_words(const std::byte* const rows[16], uint32_t num_lines, bool nibbles, std::byte* target) {
  nibbles ? transpose<true>(rows, num_lines, target) : transpose<false>(rows, num_lines, target);
}

}  // namespace moebius
