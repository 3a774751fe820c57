// Group scales of a panel to float32, exactly. Included INSIDE an anonymous namespace of a file built for AVX-512,
// after <immintrin.h> and kernels/format/panel_layout.h.

MOEBIUS_INLINE __m512 widen_e8m0(__m512i codes) {
  const __m512i bits = _mm512_slli_epi32(codes, 23);
  const __m512i smallest = _mm512_set1_epi32(0x00400000);  // 2^-127, a subnormal
  const __m512i nan = _mm512_set1_epi32(0x7fc00000);
  const __m512i low = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(codes, codes), smallest);
  return _mm512_castsi512_ps(
      _mm512_mask_mov_epi32(low, _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(255)), nan));
}

// As a float16 the shifted code is value / 256, also where it is subnormal.
MOEBIUS_INLINE __m512 widen_e4m3(__m128i codes) {
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);  // the sign is in both upper bits
  __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m256i all_ones = _mm256_set1_epi16(0x3f80);
  half = _mm256_mask_mov_epi16(half, _mm256_cmpeq_epi16_mask(_mm256_and_si256(half, all_ones), all_ones),
                               _mm256_set1_epi16(0x7e00));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

// The 16 scales of a group.
template <ScaleType kType>
MOEBIUS_INLINE __m512 widen_group(const std::byte* scales) {
  if constexpr (kType == ScaleType::kBFloat16 || kType == ScaleType::kFloat16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
    if constexpr (kType == ScaleType::kFloat16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  } else {
    static_assert(kType == ScaleType::kE8M0 || kType == ScaleType::kE4M3);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
    if constexpr (kType == ScaleType::kE8M0) return widen_e8m0(_mm512_cvtepu8_epi32(bytes));
    return widen_e4m3(bytes);
  }
}

// Bytes of a group's 16 scales.
constexpr size_t group_scale_bytes(ScaleType type) {
  switch (type) {
    case ScaleType::kNone: return 0;
    case ScaleType::kFloat32: return 64;
    case ScaleType::kBFloat16:
    case ScaleType::kFloat16: return 32;
    case ScaleType::kE8M0:
    case ScaleType::kE4M3: return 16;
  }
  return 0;
}
