// Codes of 2 to 6 bits, iq codes among them, to tiles of bfloat16, exactly. Included INSIDE an anonymous namespace of a
// file built for AMX, after kernels/format/codebooks.h, decode_bf16.inc.h and code_planes.inc.h.

// What codes mean, as bfloat16.
struct SmallTable {
  alignas(64) uint16_t value[64];

  explicit SmallTable(const WeightFormat& format) {
    const auto middles = [](Code code) {
      return code == Code::kInt2 ? 2 : code == Code::kInt3 ? 4 : code == Code::kInt5 ? 16 : 32;
    };
    for (int code = 0; code < 64; ++code) {
      float meant;
      if (format.code >= Code::kIq4) {
        const Codebook& book = *kCodebooks[static_cast<int>(format.code) - static_cast<int>(Code::kIq4)];
        meant = static_cast<float>(book.values[code % 16]) * book.unit;
      } else {
        meant = static_cast<float>(code - (format.mins ? 0 : middles(format.code)));
      }
      uint32_t bits;
      __builtin_memcpy(&bits, &meant, sizeof bits);
      value[code] = static_cast<uint16_t>(bits >> 16);
    }
  }
};

template <int kBits>
struct SmallDecoder {
  static constexpr uint32_t kTileLines = kBits;
  __m512i first, second;  // 32 values each

  static SmallDecoder of(const WeightFormat& format) {
    const SmallTable table(format);
    return {_mm512_load_si512(table.value), _mm512_load_si512(table.value + 32)};
  }

  // Of the low six bits of each half; what is above them does not matter.
  MOEBIUS_INLINE __m512i pairs(__m512i codes) const { return _mm512_permutex2var_epi16(first, codes, second); }

  template <int kRun>
  MOEBIUS_INLINE void decode_run(const std::byte* planes, uint16_t* tile) const {
    const __m512i even = plane_codes<kBits, 2 * kRun>(planes);
    const __m512i odd = plane_codes<kBits, 2 * kRun + 1>(planes);
    uint16_t* const target = tile + kRun * 4 * 32;
    _mm512_store_si512(target, pairs(even));
    _mm512_store_si512(target + 32, pairs(odd));
    _mm512_store_si512(target + 64, pairs(_mm512_srli_epi16(even, 8)));
    _mm512_store_si512(target + 96, pairs(_mm512_srli_epi16(odd, 8)));
  }
};

template <int kBits>
MOEBIUS_INLINE void decode_tile(const SmallDecoder<kBits>& decode, const std::byte* codes, uint32_t k, uint16_t* tile) {
  const std::byte* const planes = codes + size_t{k} / kTileK * (kBits * 64);
  decode.template decode_run<0>(planes, tile);
  decode.template decode_run<1>(planes, tile);
  decode.template decode_run<2>(planes, tile);
  decode.template decode_run<3>(planes, tile);
}
