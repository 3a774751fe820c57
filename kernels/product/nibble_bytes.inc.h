// 4-bit codes of a line to bytes, for dot_split.inc.h. Included INSIDE an anonymous namespace of a file built for
// AVX-512. With GFNI and VBMI one half of a line or both take an operation less.
//
// A byte is an unsigned code, kOffset more than its value in units of kUnit. low() takes the low nibbles of 64 bytes,
// high() the high ones.

template <Code kCode>
struct ByteDecoder;

MOEBIUS_INLINE __m512i low_nibbles(__m512i both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }

MOEBIUS_INLINE __m512i high_nibbles(__m512i both) {
#ifdef __GFNI__
  // By the bit matrix of a shift to the right by 4.
  return _mm512_gf2p8affine_epi64_epi8(both, _mm512_set1_epi64(0x1020408000000000), 0);
#else
  return low_nibbles(_mm512_srli_epi16(both, 4));
#endif
}

template <>
struct ByteDecoder<Code::kInt4> {
  static constexpr int32_t kOffset = 8;
  static constexpr float kUnit = 1.0f;
  MOEBIUS_INLINE __m512i low(__m512i both) const { return low_nibbles(both); }
  MOEBIUS_INLINE __m512i high(__m512i both) const { return high_nibbles(both); }
};

template <>
struct ByteDecoder<Code::kFloat4> {
  static constexpr int32_t kOffset = 12;
  static constexpr float kUnit = 0.5f;
  __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
#ifdef __AVX512VBMI__
  // vpermb looks at the low 6 bits of a byte: the table says the same whatever the upper two of them are.
  MOEBIUS_INLINE __m512i low(__m512i both) const { return _mm512_permutexvar_epi8(both, table); }
  MOEBIUS_INLINE __m512i high(__m512i both) const { return low(_mm512_srli_epi16(both, 4)); }
#else
  MOEBIUS_INLINE __m512i low(__m512i both) const { return _mm512_shuffle_epi8(table, low_nibbles(both)); }
  MOEBIUS_INLINE __m512i high(__m512i both) const { return _mm512_shuffle_epi8(table, high_nibbles(both)); }
#endif
};
