// Where tiles come from. Included INSIDE an anonymous namespace, after decode_bf16.inc.h and amx_tasks.inc.h.
//
// A `Source` turns panels into tiles:
//   kParts      tiles per step of k (2: the high and the low part of float16)
//   kLines      64-byte lines of packed codes per step
//   kDecodes    whether tiles are made in a buffer, or are the packed codes themselves
//   tiles(panel, begin, steps, buffer)   the tiles of steps [begin, begin + steps); buffer: kParts KiB a step
//   task(next, after_next, buffer, product_steps)   makes the tiles of the next piece bit by bit beside
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
struct Mxfp4Tiles : DecodedTiles<Mxfp4Tiles, 1, 4> {
  CodeDecoder<Code::kFloat4> decoder;
  size_t scales_offset;
  explicit Mxfp4Tiles(const PanelLayout& layout) : scales_offset(layout.scales_offset) {}
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
