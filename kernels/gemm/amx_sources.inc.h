// Group scales of a panel for tile products. Included INSIDE an anonymous namespace, after widen_scales.inc.h.

// 16 e4m3 scales.
MOEBIUS_INLINE __m512 e4m3_scales(const std::byte* codes) {
  return widen_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

// target[padded_groups][16] float32, 64-byte aligned. Blocks of fp8 have one scale for all 16 columns.
void column_scales_of_groups(const PanelLayout& layout, const std::byte* panel, float* target) {
  if (!layout.format.panel_scale) return widen_scales(layout, panel, target);
  const float* scales = reinterpret_cast<const float*>(panel + layout.scales_offset);
  for (uint32_t group = 0; group < padded_groups(layout); ++group) {
    _mm512_store_ps(target + size_t{group} * kPanelColumns, _mm512_set1_ps(group < layout.groups ? scales[group] : 0));
  }
}

// --- Where tiles come from.
//
// A `Source` turns panels into tiles:
//   kParts      tiles per step of k (2: the high and the low part of float16)
//   kLines      64-byte lines of packed codes per step
//   kDecodes    whether tiles are made in a buffer, or are the packed codes themselves
//   tiles(panel, begin, steps, buffer)   the tiles of steps [begin, begin + steps); buffer: kParts KiB a step
//   task(next, after_next, buffer, product_steps)   makes the tiles of the next piece bit by bit between
//               `product_steps` steps of products of the piece before (step), then what is left (finish)

// Packed codes that are tiles already.
struct PackedTiles {
  static constexpr int kParts = 1;
  static constexpr uint32_t kLines = 16;
  static constexpr bool kDecodes = false;
  explicit PackedTiles(const PanelLayout&) {}
  static const std::byte* tiles(const std::byte* panel, uint32_t begin, uint32_t /*steps*/, std::byte* /*buffer*/) {
    return panel + begin * kTileBytes;
  }
  static Task task(const Piece& next, const Piece& /*after_next*/, std::byte* /*buffer*/, uint32_t product_steps) {
    return fetch_task(next, kLines, product_steps);
  }
};

// Decodes step by step: Derived::decode(panel, step, tile) makes kParts tiles.
template <class Derived, int kPartsOf, uint32_t kLinesOf>
struct DecodedTiles {
  static constexpr int kParts = kPartsOf;
  static constexpr uint32_t kLines = kLinesOf;
  static constexpr bool kDecodes = true;
  const std::byte* tiles(const std::byte* panel, uint32_t begin, uint32_t steps, std::byte* buffer) const {
    const Derived derived = static_cast<const Derived&>(*this);
    for (uint32_t step = 0; step < steps; ++step) {
      derived.decode(panel, begin + step, reinterpret_cast<uint16_t*>(buffer + step * kParts * kTileBytes));
    }
    return buffer;
  }
  Task task(const Piece& next, const Piece& after_next, std::byte* buffer, uint32_t product_steps) const {
    return decode_task(static_cast<const Derived&>(*this), next, after_next, buffer, product_steps);
  }
};

template <Code kCode>
struct CodeTiles : DecodedTiles<CodeTiles<kCode>, 1, 16 / CodeDecoder<kCode>::kVectors> {
  CodeDecoder<kCode> decoder;
  explicit CodeTiles(const PanelLayout&) {}
  MOEBIUS_INLINE void decode(const std::byte* panel, uint32_t step, uint16_t* tile) const {
    decode_tile(decoder, panel, step * kTileK, tile);
  }
};

struct Float16Tiles : DecodedTiles<Float16Tiles, 2, 16> {
  explicit Float16Tiles(const PanelLayout&) {}
  MOEBIUS_INLINE void decode(const std::byte* panel, uint32_t step, uint16_t* tile) const {
    decode_tile_float16(panel, step * kTileK, tile, tile + kTileBytes / sizeof(uint16_t));
  }
};

struct Int4ZerosTiles : DecodedTiles<Int4ZerosTiles, 1, 4> {
  Int4ZerosDecoder decoder;
  size_t zeros_offset;
  uint32_t group_size;
  explicit Int4ZerosTiles(const PanelLayout& layout)
      : zeros_offset(layout.zeros_offset), group_size(layout.format.group_size) {}
  MOEBIUS_INLINE void decode(const std::byte* panel, uint32_t step, uint16_t* tile) const {
    const uint32_t k = step * kTileK;
    decode_tile_zeros(decoder, panel, k, panel + zeros_offset + size_t{k / group_size} * kPanelColumns, tile);
  }
};

// Scales are powers of two, so their products are exact. A NaN scale makes its columns NaN.
template <Code kCode>
struct PowerTiles : DecodedTiles<PowerTiles<kCode>, 1, 16 / CodeDecoder<kCode>::kVectors> {
  CodeDecoder<kCode> decoder;
  size_t scales_offset;
  explicit PowerTiles(const PanelLayout& layout) : scales_offset(layout.scales_offset) {}
  MOEBIUS_INLINE void decode(const std::byte* panel, uint32_t step, uint16_t* tile) const {
    const std::byte* scales = panel + scales_offset + step * kPanelColumns;
    decode_tile_e8m0(decoder, panel, step * kTileK, scales, tile);
    const __mmask16 nan = nan_scales_e8m0(scales);
    if (nan != 0) [[unlikely]] _mm512_mask_storeu_epi32(tile, nan, _mm512_set1_epi32(0x7fc07fc0));
  }
};

// Scales have 4 significant bits, values 2: products are exact.
struct Nvfp4Tiles : DecodedTiles<Nvfp4Tiles, 1, 4> {
  CodeDecoder<Code::kFloat4> decoder;
  size_t scales_offset;
  uint32_t groups;
  explicit Nvfp4Tiles(const PanelLayout& layout) : scales_offset(layout.scales_offset), groups(layout.groups) {}
  MOEBIUS_INLINE void decode(const std::byte* panel, uint32_t step, uint16_t* tile) const {
    alignas(64) float scales[2 * kPanelColumns];
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t group = 2 * step + half;  // k may end in the middle of a tile
      const __m512 scale = group < groups ? e4m3_scales(panel + scales_offset + group * kPanelColumns)
                                          : _mm512_setzero_ps();
      _mm512_store_ps(scales + half * kPanelColumns, scale);
    }
    decode_tile_e4m3(decoder, panel, step * kTileK, scales, tile);
  }
};

// --- Integer weights times their group scale as the sum of two bfloat16.
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
    const ScaleSection scales{panel + scales_offset, nullptr, 0, -1, nullptr};
    const __m512 scale = format.scale == ScaleType::kFloat16 ? widen_group<ScaleType::kFloat16>(scales, group)
                                                             : widen_group<ScaleType::kBFloat16>(scales, group);
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

// Scales or mins of a panel.
struct GroupSection {
  const PanelLayout& layout;
  bool of_mins;

  // Of the group that k is in, 16 columns; 0 beyond the last group.
  template <ScaleType kType>
  MOEBIUS_INLINE __m512 at(const std::byte* panel, uint32_t k) const {
    const uint32_t group = k / layout.format.group_size;
    if (group >= layout.groups) return _mm512_setzero_ps();
    return widen_group<kType>(scale_section(layout, panel, of_mins), group);
  }
};

// code * scale + minimum, to within 2^-17 of a weight: a float16 scale (or a product) times 8 bits, and sums with mins,
// have more bits than two bfloat16. Groups of 16 have two scales a tile.
template <class Decoder, ScaleType kType>
struct WeightTiles : DecodedTiles<WeightTiles<Decoder, kType>, 2, Decoder::kTileLines> {
  Decoder decoder;
  GroupSection scales;
  GroupSection mins;
  bool has_mins;
  explicit WeightTiles(const PanelLayout& layout)
      : decoder(Decoder::of(layout.format)),
        scales{layout, false},
        mins{layout, true},
        has_mins(layout.format.mins) {}

  MOEBIUS_INLINE void decode(const std::byte* panel, uint32_t step, uint16_t* tile) const {
    uint16_t* low_tile = tile + kTileBytes / sizeof(uint16_t);
    decode_tile(decoder, panel, step * kTileK, low_tile);
#pragma GCC unroll 2
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t k = step * kTileK + half * 16;
      const __m512 scale = scales.template at<kType>(panel, k);
      const __m512 minimum = has_mins ? mins.template at<kType>(panel, k) : _mm512_setzero_ps();
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
