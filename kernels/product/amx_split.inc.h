// Integer weights times their group scale as the sum of two bfloat16. Included INSIDE an anonymous namespace, after
// amx_sources.inc.h.
//
// 4 significant bits times the 8 of a bfloat16 scale or the 11 of a float16 one fit into twice 8, so this is exact.
// Two products a tile instead of one, but sums stay in their tiles: for many rows that is faster than taking small
// groups' sums out.
template <class Codes>
struct SplitTiles : DecodedTiles<SplitTiles<Codes>, 2, Codes::kLines> {
  Codes codes;
  WeightFormat format;
  size_t scales_offset;
  explicit SplitTiles(const PanelLayout& layout)
      : codes(layout), format(layout.format), scales_offset(layout.scales_offset) {}
  MOEBIUS_INLINE void decode(const std::byte* panel, uint32_t step, uint16_t* tile) const {
    uint16_t* low_tile = tile + kTileBytes / sizeof(uint16_t);
    codes.decode(panel, step, low_tile);
    const uint32_t group = step * kTileK / format.group_size;
    const std::byte* at = panel + scales_offset + group * size_t{32};
    const __m512 scale = format.scale == ScaleType::kFloat16 ? widen_group<ScaleType::kFloat16>(at)
                                                             : widen_group<ScaleType::kBFloat16>(at);
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
#pragma GCC unroll 4
    for (int i = 0; i < 16; ++i) {
      const __m512i pair = _mm512_load_si512(low_tile + i * 32);
      const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), scale);
      const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pair, mask)), scale);
      const __m512i high_even = _mm512_and_si512(_mm512_castps_si512(even), mask);
      const __m512i high_odd = _mm512_and_si512(_mm512_castps_si512(odd), mask);
      const __m512i low_even = _mm512_castps_si512(_mm512_sub_ps(even, _mm512_castsi512_ps(high_even)));
      const __m512i low_odd = _mm512_castps_si512(_mm512_sub_ps(odd, _mm512_castsi512_ps(high_odd)));
      _mm512_store_si512(tile + i * 32, _mm512_or_si512(_mm512_srli_epi32(high_even, 16), high_odd));
      // low | (mask & low_odd)
      _mm512_store_si512(low_tile + i * 32,
                         _mm512_ternarylogic_epi32(_mm512_srli_epi32(low_even, 16), low_odd, mask, 0xf8));
    }
  }
};

// Scales or minimums of a panel.
struct GroupSection {
  size_t offset;        // of the panel
  uint32_t groups;
  uint32_t group_size;

  // Of the group that k is in, 16 columns; 0 beyond the last group.
  template <ScaleType kType>
  MOEBIUS_INLINE __m512 at(const std::byte* panel, uint32_t k) const {
    const uint32_t group = k / group_size;
    if (group >= groups) return _mm512_setzero_ps();
    return widen_group<kType>(panel + offset + group * size_t{32});
  }
};

// code * scale + minimum, to within 2^-18 of a weight: a float16 scale times 8 bits, and sums with minimums, have
// more bits than two bfloat16. Groups of 16 have two scales a tile.
template <class Decoder, ScaleType kType>
struct WeightTiles : DecodedTiles<WeightTiles<Decoder, kType>, 2, 16 / Decoder::kVectors> {
  Decoder decoder;
  GroupSection scales;
  GroupSection minimums;
  bool has_minimums;
  explicit WeightTiles(const PanelLayout& layout)
      : scales{layout.scales_offset, layout.groups, layout.format.group_size},
        minimums{layout.minimums_offset, layout.groups, layout.format.group_size},
        has_minimums(layout.format.minimums) {}

  MOEBIUS_INLINE void decode(const std::byte* panel, uint32_t step, uint16_t* tile) const {
    uint16_t* low_tile = tile + kTileBytes / sizeof(uint16_t);
    decode_tile(decoder, panel, step * kTileK, low_tile);
#pragma GCC unroll 2
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t k = step * kTileK + half * 16;
      const __m512 scale = scales.template at<kType>(panel, k);
      const __m512 minimum = has_minimums ? minimums.template at<kType>(panel, k) : _mm512_setzero_ps();
#pragma GCC unroll 8
      for (uint32_t i = half * 8; i < half * 8 + 8; ++i) split(low_tile + i * 32, scale, minimum, tile + i * 32);
    }
  }

 private:
  MOEBIUS_INLINE static void split(uint16_t* low, __m512 scale, __m512 minimum, uint16_t* high) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i pair = _mm512_load_si512(low);
    const __m512 even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), scale, minimum);
    const __m512 odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(pair, mask)), scale, minimum);
    const __m512i rounded = pairs_of(even, odd);
    const __m512 low_even = _mm512_sub_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(rounded, 16)));
    const __m512 low_odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(rounded, mask)));
    _mm512_store_si512(high, rounded);
    _mm512_store_si512(low, pairs_of(low_even, low_odd));
  }

  // Rounded to nearest even; subnormals become zero.
  MOEBIUS_INLINE static __m512i pairs_of(__m512 even, __m512 odd) {
    const __m512i order = _mm512_add_epi32(
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(0x00010001)),
        _mm512_set1_epi32(0x00100000));
    return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
  }
};

template <ScaleType kType>
using Int8WeightTiles = WeightTiles<CodeDecoder<Code::kInt8>, kType>;
