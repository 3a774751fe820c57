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

// To the upper halves of words in one operation, and a load that broadcasts.
MOEBIUS_INLINE __m512 widen_bfloat16(__m256i halves) {
  const __m512i upper = _mm512_setr_epi32(0x0 << 16, 0x1 << 16, 0x2 << 16, 0x3 << 16, 0x4 << 16, 0x5 << 16, 0x6 << 16,
                                          0x7 << 16, 0x8 << 16, 0x9 << 16, 0xa << 16, 0xb << 16, 0xc << 16, 0xd << 16,
                                          0xe << 16, 0xf << 16);
  return _mm512_castsi512_ps(
      _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, upper, _mm512_broadcast_i64x4(halves)));
}

// Scales or mins of a panel, as stored.
struct ScaleSection {
  const std::byte* first;   // null: none
  const std::byte* whole;   // of products: the int8
  uint32_t factor_shift;    // of products: a group's factor is group >> factor_shift
  int place;                // of products whose int8 hold two: the bit that this one begins at; else -1
  const std::byte* high;    // of products whose whole numbers are 4 bits and 2 bits of 32 more: the 2 bits; else null
};

inline ScaleSection scale_section(const PanelLayout& layout, const std::byte* panel, bool of_mins) {
  const std::byte* const scales = panel + layout.scales_offset;
  const std::byte* const first = of_mins ? panel + layout.mins_offset : scales;
  const auto shift = layout.factor_groups == 0 ? 0U : static_cast<uint32_t>(__builtin_ctz(layout.factor_groups));
  return {first, (layout.joined ? scales : first) + layout.whole_offset, shift, layout.joined ? 4 * of_mins : -1,
          layout.whole_high_bits != 0 ? first + layout.whole_high_offset : nullptr};
}

// Bits of 16 bytes, from one on.
MOEBIUS_INLINE __m128i byte_bits(const std::byte* at, uint32_t bit, int mask) {
  const __m128i moved = _mm_srl_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)),
                                      _mm_cvtsi32_si128(static_cast<int>(bit)));
  return _mm_and_si128(moved, _mm_set1_epi8(static_cast<char>(mask)));
}

// The whole numbers of products, int8 of 16 columns.
MOEBIUS_INLINE __m128i whole_numbers(const ScaleSection& section, uint32_t group) {
  if (section.high != nullptr) {
    const __m128i low = byte_bits(section.whole + size_t{group / 2} * 16, group % 2 * 4, 15);
    const __m128i high = byte_bits(section.high + size_t{group / 4} * 16, group % 4 * 2, 3);
    return _mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi16(high, 4)), _mm_set1_epi8(32));
  }
  const std::byte* at = section.whole + size_t{group} * 16;
  if (section.place >= 0) return byte_bits(at, static_cast<uint32_t>(section.place), 15);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// The 16 scales of a group.
template <ScaleType kType>
MOEBIUS_INLINE __m512 widen_group(const ScaleSection& section, uint32_t group) {
  if constexpr (kType == ScaleType::kFloat32) {
    return _mm512_loadu_ps(section.first + size_t{group} * 64);
  } else if constexpr (kType == ScaleType::kProducts) {
    const std::byte* factors = section.first + size_t{group >> section.factor_shift} * 32;
    const __m512 factor = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors)));
    return _mm512_mul_ps(factor, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(whole_numbers(section, group))));
  } else if constexpr (kType == ScaleType::kBFloat16 || kType == ScaleType::kFloat16) {
    const std::byte* at = section.first + size_t{group} * 32;
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    if constexpr (kType == ScaleType::kFloat16) return _mm512_cvtph_ps(halves);
    return widen_bfloat16(halves);
  } else {
    static_assert(kType == ScaleType::kE8M0 || kType == ScaleType::kE4M3);
    const std::byte* at = section.first + size_t{group} * 16;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    if constexpr (kType == ScaleType::kE8M0) return widen_e8m0(_mm512_cvtepu8_epi32(bytes));
    return widen_e4m3(bytes);
  }
}

// Groups that k_padded touches: more than layout.groups where k ends early.
MOEBIUS_INLINE uint32_t padded_groups(const PanelLayout& layout) {
  const uint32_t size = layout.format.group_size;
  return size == 0 ? 0 : (layout.k_padded + size - 1) / size;
}

template <ScaleType kType>
inline void widen_groups(const ScaleSection& scales, uint32_t groups, float* target) {
  for (uint32_t group = 0; group < groups; ++group) {
    _mm512_store_ps(target + size_t{group} * 16, widen_group<kType>(scales, group));
  }
}

// target[padded_groups][16] float32, 64-byte aligned; groups of padding get 0, never what lies after the scales.
inline void widen_scales(const PanelLayout& layout, const std::byte* panel, float* target) {
  const ScaleSection scales = scale_section(layout, panel, false);
  switch (layout.format.scale) {
    case ScaleType::kNone: break;
    case ScaleType::kFloat32: widen_groups<ScaleType::kFloat32>(scales, layout.groups, target); break;
    case ScaleType::kBFloat16: widen_groups<ScaleType::kBFloat16>(scales, layout.groups, target); break;
    case ScaleType::kFloat16: widen_groups<ScaleType::kFloat16>(scales, layout.groups, target); break;
    case ScaleType::kE8M0: widen_groups<ScaleType::kE8M0>(scales, layout.groups, target); break;
    case ScaleType::kE4M3: widen_groups<ScaleType::kE4M3>(scales, layout.groups, target); break;
    case ScaleType::kProducts: widen_groups<ScaleType::kProducts>(scales, layout.groups, target); break;
  }
  for (uint32_t group = layout.groups; group < padded_groups(layout); ++group) {
    _mm512_store_ps(target + size_t{group} * 16, _mm512_setzero_ps());
  }
}
