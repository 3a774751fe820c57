// Codes of 2, 3, 5 and 6 bits of a panel to vectors of a byte each: the planes of panel_layout.h. Included INSIDE an
// anonymous namespace of a file built for AVX-512, after <immintrin.h> and a definition of MOEBIUS_INLINE.

template <int kShift>
MOEBIUS_INLINE __m512i shift_right(__m512i x) {
  if constexpr (kShift > 0) return _mm512_srli_epi16(x, kShift);
  if constexpr (kShift < 0) return _mm512_slli_epi16(x, -kShift);
  return x;
}

// Vector kVector of the eight of 32 k, which begin at `planes`: for each column four codes, one a byte.
template <int kBits, int kVector>
MOEBIUS_INLINE __m512i plane_codes(const std::byte* planes) {
  constexpr int kLowBits = kBits < 4 ? 2 : 4;
  constexpr int kHighBits = kBits - kLowBits;
  constexpr int kInLine = 8 / kLowBits;
  const __m512i held = _mm512_load_si512(planes + kVector / kInLine * 64);
  const __m512i low = _mm512_and_si512(shift_right<kVector % kInLine * kLowBits>(held),
                                       _mm512_set1_epi8((1 << kLowBits) - 1));
  if constexpr (kHighBits == 0) {
    return low;
  } else {
    constexpr int kHighInLine = 8 / kHighBits;
    const __m512i line = _mm512_load_si512(planes + (kLowBits + kVector / kHighInLine) * 64);
    const __m512i high = shift_right<kVector % kHighInLine * kHighBits - kLowBits>(line);
    const __m512i mask = _mm512_set1_epi8(((1 << kHighBits) - 1) << kLowBits);
    return _mm512_ternarylogic_epi32(low, high, mask, 0xf8);  // low | (high & mask)
  }
}
