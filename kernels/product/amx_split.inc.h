// int4 weights times their group scale as the sum of two bfloat16. Included INSIDE an anonymous namespace, after
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
