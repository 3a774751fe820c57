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
MOEBIUS_INLINE __m512 widen_e4m3(__m256i codes) {
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)), 8);
  const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
  const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
  return _mm512_mask_mov_ps(value, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

// The 16 scales of a group.
MOEBIUS_INLINE __m512 widen_group(ScaleType type, const std::byte* scales) {
  if (type == ScaleType::kFloat32) return _mm512_loadu_ps(scales);
  if (type == ScaleType::kBFloat16 || type == ScaleType::kFloat16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
    if (type == ScaleType::kFloat16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  return type == ScaleType::kE8M0 ? widen_e8m0(_mm512_cvtepu8_epi32(bytes)) : widen_e4m3(_mm256_cvtepu8_epi16(bytes));
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

// Groups that k_padded touches: one or more than layout.groups where k ends early.
MOEBIUS_INLINE uint32_t padded_groups(const PanelLayout& layout) {
  const uint32_t size = layout.format.group_size;
  return size == 0 ? 0 : (layout.k_padded + size - 1) / size;
}

// target[padded_groups][16]; groups of padding get 0, never what lies behind the scales.
inline void widen_scales(const PanelLayout& layout, const std::byte* panel, float* target) {
  const std::byte* scales = panel + layout.scales_offset;
  const size_t group_bytes = group_scale_bytes(layout.format.scale);
  for (uint32_t group = 0; group < layout.groups; ++group) {
    _mm512_store_ps(target + group * 16, widen_group(layout.format.scale, scales + group * group_bytes));
  }
  for (uint32_t group = layout.groups; group < padded_groups(layout); ++group) {
    _mm512_store_ps(target + group * 16, _mm512_setzero_ps());
  }
}
