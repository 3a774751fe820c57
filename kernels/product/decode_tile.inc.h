// Tiles of bfloat16 decoded to memory, on top of decode_bf16.inc.h, which includes this file.
//
//   decode_tile(decode, codes, k, tile)                  // any CodeDecoder
//   decode_tile_zeros(decode, codes, k, zeros, tile)     // kInt4, minus the 16 zero points of k's group
//   decode_tile_e8m0(decode, codes, k, scales, tile)     // mxfp4: value * scale
//   decode_tile_e4m3(decode, codes, k, scales, tile)     // nvfp4: value * scale
//   decode_tile_float16(codes, k, high, low)             // high + low = value
//
// `codes` is the panel's begin; 32 k from k (a multiple of 32) on are decoded; `tile` has 1 KiB, 64-byte aligned.
// Scales and zeros are those of k's group: callers know the group sizes.

constexpr int kTileVectors = 16;
constexpr uint32_t kTileK = 32;

template <int kVectors>
MOEBIUS_INLINE const std::byte* tile_line(const std::byte* codes, uint32_t k, int line) {
  return codes + (static_cast<size_t>(k) / (2 * kVectors) + static_cast<size_t>(line)) * 64;
}

template <int kVectors>
MOEBIUS_INLINE void store_vectors(const __m512i (&vectors)[kVectors], uint16_t* tile, int line) {
  for (int j = 0; j < kVectors; ++j) _mm512_store_si512(tile + (line * kVectors + j) * 32, vectors[j]);
}

template <class Decoder>
MOEBIUS_INLINE void decode_tile(const Decoder& decode, const std::byte* codes, uint32_t k, uint16_t* tile) {
  constexpr int kVectors = Decoder::kVectors;
#pragma GCC unroll 16
  for (int line = 0; line < kTileVectors / kVectors; ++line) {
    __m512i vectors[kVectors];
    decode(tile_line<kVectors>(codes, k, line), vectors);
    store_vectors(vectors, tile, line);
  }
}

MOEBIUS_INLINE void decode_tile_zeros(const Int4ZerosDecoder& decode, const std::byte* codes, uint32_t k,
                                      const std::byte* zeros, uint16_t* tile) {
  const __m512i zero_points = Int4ZerosDecoder::load_zeros(zeros);
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) {
    __m512i vectors[4];
    decode(tile_line<4>(codes, k, line), zero_points, vectors);
    store_vectors(vectors, tile, line);
  }
}

// Whether any of the 16 e8m0 scales of a group is NaN (code 255). decode_tile_e8m0 can not express it: results
// of those columns must be made NaN by the caller.
MOEBIUS_INLINE __mmask16 nan_scales_e8m0(const std::byte* scales) {
  return _mm_cmpeq_epi8_mask(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)), _mm_set1_epi8(-1));
}

// value * 2^e by adding e to the exponent, exact for -125 <= e <= 125. Scales beyond are taken as 2^-125 and
// 2^125: there bfloat16 has no normal numbers for all of 0.5..6, and float32 sums over or underflow anyway.
// scales: the 16 e8m0 codes of k's group of 32.
MOEBIUS_INLINE void decode_tile_e8m0(const CodeDecoder<Code::kFloat4>& decode, const std::byte* codes, uint32_t k,
                                     const std::byte* scales, uint16_t* tile) {
  __m512i exponent = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  exponent = _mm512_sub_epi32(exponent, _mm512_set1_epi32(127));
  exponent = _mm512_min_epi32(_mm512_max_epi32(exponent, _mm512_set1_epi32(-125)), _mm512_set1_epi32(125));
  exponent = _mm512_and_si512(_mm512_slli_epi32(exponent, 7), _mm512_set1_epi32(0xffff));
  exponent = _mm512_or_si512(exponent, _mm512_slli_epi32(exponent, 16));
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) {
    __m512i vectors[4];
    decode(tile_line<4>(codes, k, line), vectors);
    for (int j = 0; j < 4; ++j) {
      const __mmask32 nonzero = _mm512_test_epi16_mask(vectors[j], vectors[j]);
      vectors[j] = _mm512_maskz_add_epi16(nonzero, vectors[j], exponent);
    }
    store_vectors(vectors, tile, line);
  }
}

// value * scale, which has at most 6 significant bits: exact (NaN scales give NaN). scales: two groups of 16
// float32, those of the 16 k from k on and of the 16 after them.
MOEBIUS_INLINE void decode_tile_e4m3(const CodeDecoder<Code::kFloat4>& decode, const std::byte* codes, uint32_t k,
                                     const float* scales, uint16_t* tile) {
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) {
    const __m512 scale = _mm512_load_ps(scales + (line / 2) * 16);
    __m512i vectors[4];
    decode(tile_line<4>(codes, k, line), vectors);
    for (int j = 0; j < 4; ++j) {
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(vectors[j], 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(vectors[j], high_half));
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(even, scale)), 16);
      vectors[j] = _mm512_or_si512(low, _mm512_castps_si512(_mm512_mul_ps(odd, scale)));
    }
    store_vectors(vectors, tile, line);
  }
}

// float16 has 11 significant bits, bfloat16 8: value = high + low, exactly. low is 0 for infinities and NaN.
struct Float16Halves {
  __m512i high;
  __m512i low;
};

MOEBIUS_INLINE Float16Halves split_float16(__m256i values) {
  const __m512 wide = _mm512_cvtph_ps(values);
  const __m512i high = _mm512_and_si512(_mm512_castps_si512(wide), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  const __mmask16 finite = _mm512_fpclass_ps_mask(wide, 0x99) ^ 0xffff;  // NaN and infinities
  return {high, _mm512_castps_si512(_mm512_maskz_sub_ps(finite, wide, _mm512_castsi512_ps(high)))};
}

MOEBIUS_INLINE void decode_tile_float16(const std::byte* codes, uint32_t k, uint16_t* high, uint16_t* low) {
#pragma GCC unroll 4
  for (int i = 0; i < kTileVectors; ++i) {
    const __m512i pairs = _mm512_load_si512(tile_line<1>(codes, k, i));
    const Float16Halves even = split_float16(_mm512_cvtepi32_epi16(pairs));
    const Float16Halves odd = split_float16(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
    _mm512_store_si512(high + i * 32, _mm512_or_si512(_mm512_srli_epi32(even.high, 16), odd.high));
    _mm512_store_si512(low + i * 32, _mm512_or_si512(_mm512_srli_epi32(even.low, 16), odd.low));
  }
}
