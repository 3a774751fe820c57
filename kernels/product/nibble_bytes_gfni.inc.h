// As nibble_bytes.inc.h, with GFNI and VBMI: an operation less for a half of a line. Included INSIDE an anonymous
// namespace of a file built for both.

template <Code kCode>
struct ByteDecoder;

template <>
struct ByteDecoder<Code::kInt4> {
  static constexpr int32_t kOffset = 8;
  static constexpr float kUnit = 1.0f;
  // The bit matrix of a shift to the right by 4.
  __m512i upper = _mm512_set1_epi64(0x1020408000000000);
  MOEBIUS_INLINE __m512i low(__m512i both) const { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
  MOEBIUS_INLINE __m512i high(__m512i both) const { return _mm512_gf2p8affine_epi64_epi8(both, upper, 0); }
};

// vpermb looks at the low 6 bits of a byte: the table says the same whatever the upper two of them are.
template <>
struct ByteDecoder<Code::kFloat4> {
  static constexpr int32_t kOffset = 12;
  static constexpr float kUnit = 0.5f;
  __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  MOEBIUS_INLINE __m512i low(__m512i both) const { return _mm512_permutexvar_epi8(both, table); }
  MOEBIUS_INLINE __m512i high(__m512i both) const { return low(_mm512_srli_epi16(both, 4)); }
};
