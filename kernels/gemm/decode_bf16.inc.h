// Codes of a panel to bfloat16, exactly. Included INSIDE an anonymous namespace of a file built for AVX-512 BF16
// or AMX, after <immintrin.h> and kernels/format/panel_layout.h: nothing here may get external linkage.
//
// A "vector" is a zmm of 16 columns; column c's 32 bits hold the bfloat16 pair (k, k + 1), k in the low half. A
// "line" is 64 bytes of a panel (panel_layout.h) and gives 1 (16-bit codes), 2 (8-bit) or 4 (4-bit) vectors, in
// order of k. A "tile" is 32 k x 16 columns = 16 vectors = 1 KiB: the right operand of a bfloat16 tile product.
//
//   CodeDecoder<kCode> decode;     // its tables, meant to stay in registers
//   decode(line, vectors)          // a line to CodeDecoder::kVectors vectors
//
// Codes are not turned into bfloat16 by shifting alone: vdpbf16ps and tdpbf16ps read subnormal bfloat16 as zero,
// and the subnormals of e4m3 would be among them.

#define MOEBIUS_INLINE [[gnu::always_inline]] inline

template <Code kCode>
struct CodeDecoder;

template <>
struct CodeDecoder<Code::kBFloat16> {
  static constexpr int kVectors = 1;
  MOEBIUS_INLINE void operator()(const std::byte* line, __m512i (&vectors)[kVectors]) const {
    vectors[0] = _mm512_load_si512(line);
  }
};

// Value tables of 8-bit codes by their low 7 bits, as high and low bytes of the bfloat16.
struct ByteTables {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
};

// bfloat16 bits of mantissa * 2^exponent, 0 <= mantissa < 256.
constexpr uint16_t bfloat16_bits(unsigned mantissa, int exponent) {
  if (mantissa == 0) return 0;
  while (mantissa < 128) {
    mantissa <<= 1;
    --exponent;
  }
  return static_cast<uint16_t>(((exponent + 7 + 127) << 7) | (mantissa & 127));
}

constexpr uint16_t float8_bits(unsigned code) {
  const unsigned exponent = (code >> 3) & 15;
  const unsigned mantissa = code & 7;
  if ((code & 127) == 127) return 0x7fc0;
  return exponent == 0 ? bfloat16_bits(mantissa, -9) : bfloat16_bits(mantissa + 8, static_cast<int>(exponent) - 10);
}

constexpr ByteTables byte_tables(uint16_t (*bits)(unsigned)) {
  ByteTables tables{};
  for (unsigned code = 0; code < 128; ++code) {
    tables.high[code] = static_cast<uint8_t>(bits(code) >> 8);
    tables.low[code] = static_cast<uint8_t>(bits(code) & 255);
  }
  return tables;
}

constexpr ByteTables kFloat8Tables = byte_tables(float8_bits);
constexpr ByteTables kMagnitudeTables = byte_tables([](unsigned code) { return bfloat16_bits(code, 0); });

// High and low bytes of 64 values, byte for byte where the codes were.
struct SplitBytes {
  __m512i high;
  __m512i low;

  // Vectors in "interleaved" order: of every four columns, first[.] has columns 0 and 1 and second 2 and 3, each
  // as two neighbouring pairs (k, k+1), (k+2, k+3). Two shuffles less than column order; a sum over k can stay
  // so until its end (fold_interleaved).
  MOEBIUS_INLINE void interleaved(__m512i (&vectors)[2]) const {
    vectors[0] = _mm512_unpacklo_epi8(low, high);
    vectors[1] = _mm512_unpackhi_epi8(low, high);
  }
  MOEBIUS_INLINE void columns(__m512i (&vectors)[2]) const {
    __m512i mixed[2];
    interleaved(mixed);
    const __m512 first = _mm512_castsi512_ps(mixed[0]);
    const __m512 second = _mm512_castsi512_ps(mixed[1]);
    vectors[0] = _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88));
    vectors[1] = _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xdd));
  }
};

// The sums of 16 columns from those of two interleaved vectors.
MOEBIUS_INLINE __m512 fold_interleaved(__m512 first, __m512 second) {
  return _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x88), _mm512_shuffle_ps(first, second, 0xdd));
}

template <>
struct CodeDecoder<Code::kFloat8> {
  static constexpr int kVectors = 2;
  __m512i high0 = _mm512_load_si512(kFloat8Tables.high), high1 = _mm512_load_si512(kFloat8Tables.high + 64);
  __m512i low0 = _mm512_load_si512(kFloat8Tables.low), low1 = _mm512_load_si512(kFloat8Tables.low + 64);
  __m512i sign = _mm512_set1_epi8(-128);

  MOEBIUS_INLINE SplitBytes split(const std::byte* line) const {
    const __m512i codes = _mm512_load_si512(line);
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, codes, high1);
    // magnitude | (codes & sign)
    return {_mm512_ternarylogic_epi32(magnitude, codes, sign, 0xf8), _mm512_permutex2var_epi8(low0, codes, low1)};
  }
  MOEBIUS_INLINE void operator()(const std::byte* line, __m512i (&vectors)[2]) const { split(line).columns(vectors); }
};

template <>
struct CodeDecoder<Code::kInt8> {
  static constexpr int kVectors = 2;
  static constexpr uint32_t kTileLines = 8;
  static CodeDecoder of(const WeightFormat&) { return {}; }
  __m512i high0 = _mm512_load_si512(kMagnitudeTables.high), high1 = _mm512_load_si512(kMagnitudeTables.high + 64);
  __m512i low0 = _mm512_load_si512(kMagnitudeTables.low), low1 = _mm512_load_si512(kMagnitudeTables.low + 64);
  __m512i sign = _mm512_set1_epi8(-128);
  __m512i minus_128 = _mm512_set1_epi8(static_cast<char>(0xc3));  // high byte of -128; its low byte is that of 0

  MOEBIUS_INLINE SplitBytes split(const std::byte* line) const {
    const __m512i codes = _mm512_load_si512(line);
    const __m512i absolute = _mm512_abs_epi8(codes);  // 128 for -128, which the tables take for 0
    __m512i high = _mm512_permutex2var_epi8(high0, absolute, high1);
    high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);
    high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(codes, sign), minus_128);
    return {high, _mm512_permutex2var_epi8(low0, absolute, low1)};
  }
  MOEBIUS_INLINE void operator()(const std::byte* line, __m512i (&vectors)[2]) const { split(line).columns(vectors); }
};

// vpermw looks at the low 5 bits of each half, one more than a code has: entries i and i + 16 are the same, and
// nothing has to be masked.
struct WordTable {
  alignas(64) uint16_t value[32];
};

constexpr WordTable int4_table() {
  WordTable table{};
  for (int i = 0; i < 32; ++i) {
    const int value = i % 16 - 8;
    table.value[i] = value < 0 ? static_cast<uint16_t>(0x8000 | bfloat16_bits(static_cast<unsigned>(-value), 0))
                               : bfloat16_bits(static_cast<unsigned>(value), 0);
  }
  return table;
}

constexpr WordTable unsigned_table() {
  WordTable table{};
  for (unsigned i = 0; i < 32; ++i) table.value[i] = bfloat16_bits(i % 16, 0);
  return table;
}

// Entry i is i taken as a 5-bit two's complement number.
constexpr WordTable difference_table() {
  WordTable table{};
  for (int i = 0; i < 32; ++i) {
    table.value[i] = i < 16 ? bfloat16_bits(static_cast<unsigned>(i), 0)
                            : static_cast<uint16_t>(0x8000 | bfloat16_bits(static_cast<unsigned>(32 - i), 0));
  }
  return table;
}

// -0 becomes +0: sums are the same, and zero is then all bits zero.
constexpr WordTable float4_table() {
  constexpr unsigned kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  WordTable table{};
  for (int i = 0; i < 32; ++i) {
    const uint16_t magnitude = bfloat16_bits(kDoubled[i % 8], -1);
    table.value[i] = static_cast<uint16_t>(i % 16 > 8 ? 0x8000 | magnitude : magnitude);
  }
  return table;
}

constexpr WordTable kInt4Table = int4_table();
constexpr WordTable kUnsignedTable = unsigned_table();
constexpr WordTable kDifferenceTable = difference_table();
constexpr WordTable kFloat4Table = float4_table();

// The compiler would otherwise reload the line for every shift, and load ports are scarce.
MOEBIUS_INLINE __m512i load_once(const std::byte* line) {
  __m512i value = _mm512_load_si512(line);
#ifdef __AVX512F__  // there is no such register where it is emulated
  __asm__("" : "+v"(value));
#endif
  return value;
}

// The codes of vector j in the low 4 bits of each half; what is above them is not zero.
MOEBIUS_INLINE void shift_codes(const std::byte* line, __m512i (&shifted)[4]) {
  shifted[0] = load_once(line);
  shifted[1] = _mm512_srli_epi32(shifted[0], 4);
  shifted[2] = _mm512_srli_epi32(shifted[0], 8);
  shifted[3] = _mm512_srli_epi32(shifted[0], 12);
}

struct FourBitDecoder {
  static constexpr int kVectors = 4;
  static constexpr uint32_t kTileLines = 4;
  __m512i table;
  explicit FourBitDecoder(const WordTable& values) : table(_mm512_load_si512(values.value)) {}
  MOEBIUS_INLINE void operator()(const std::byte* line, __m512i (&vectors)[4]) const {
    shift_codes(line, vectors);
    for (int j = 0; j < 4; ++j) vectors[j] = _mm512_permutexvar_epi16(vectors[j], table);
  }
};

template <>
struct CodeDecoder<Code::kInt4> : FourBitDecoder {  // code - 8
  CodeDecoder() : FourBitDecoder(kInt4Table) {}
  static CodeDecoder of(const WeightFormat&) { return {}; }
};

// kInt4 with mins: the code itself.
struct UnsignedInt4Decoder : FourBitDecoder {
  UnsignedInt4Decoder() : FourBitDecoder(kUnsignedTable) {}
  static UnsignedInt4Decoder of(const WeightFormat&) { return {}; }
};

template <>
struct CodeDecoder<Code::kFloat4> : FourBitDecoder {
  CodeDecoder() : FourBitDecoder(kFloat4Table) {}
};

// kInt4 with zero points: code - zero, subtracted as integers.
struct Int4ZerosDecoder {
  __m512i table = _mm512_load_si512(kDifferenceTable.value);
  __m512i code_mask = _mm512_set1_epi16(15);

  // A group's 16 zero points, each in both halves of its column.
  MOEBIUS_INLINE static __m512i load_zeros(const std::byte* zeros) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
    return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
  }
  MOEBIUS_INLINE void operator()(const std::byte* line, __m512i zeros, __m512i (&vectors)[4]) const {
    shift_codes(line, vectors);
    for (int j = 0; j < 4; ++j) {
      const __m512i difference = _mm512_sub_epi16(_mm512_and_si512(vectors[j], code_mask), zeros);
      vectors[j] = _mm512_permutexvar_epi16(difference, table);
    }
  }
};


// --- Tiles of bfloat16 decoded to memory.
//
//   decode_tile(decode, codes, k, tile)                  // any CodeDecoder
//   decode_tile_zeros(decode, codes, k, zeros, tile)     // kInt4, minus the 16 zero points of k's group
//   decode_tile_e8m0(decode, codes, k, scales, tile)     // mxfp4, mxfp8: value * scale
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

// Powers of two that take every value of a code to a normal bfloat16.
template <Code kCode>
struct ExactPowers;
template <>
struct ExactPowers<Code::kFloat4> {  // 0.5..6
  static constexpr int kLeast = -125, kMost = 125;
};
template <>
struct ExactPowers<Code::kFloat8> {  // 2^-9..448
  static constexpr int kLeast = -117, kMost = 119;
};

// value * 2^e by adding e to the exponent, exact for e of `ExactPowers`. Scales beyond are taken as the nearest of
// those: float32 sums over or underflow there anyway. Values that are NaN stay so.
// scales: the 16 e8m0 codes of k's group of 32.
template <Code kCode>
MOEBIUS_INLINE void decode_tile_e8m0(const CodeDecoder<kCode>& decode, const std::byte* codes, uint32_t k,
                                     const std::byte* scales, uint16_t* tile) {
  constexpr int kVectors = CodeDecoder<kCode>::kVectors;
  using Powers = ExactPowers<kCode>;
  __m512i exponent = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  exponent = _mm512_sub_epi32(exponent, _mm512_set1_epi32(127));
  exponent = _mm512_max_epi32(exponent, _mm512_set1_epi32(Powers::kLeast));
  exponent = _mm512_min_epi32(exponent, _mm512_set1_epi32(Powers::kMost));
  exponent = _mm512_and_si512(_mm512_slli_epi32(exponent, 7), _mm512_set1_epi32(0xffff));
  exponent = _mm512_or_si512(exponent, _mm512_slli_epi32(exponent, 16));
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
#pragma GCC unroll 8
  for (int line = 0; line < kTileVectors / kVectors; ++line) {
    __m512i vectors[kVectors];
    decode(tile_line<kVectors>(codes, k, line), vectors);
    for (int j = 0; j < kVectors; ++j) {
      __mmask32 scaled = _mm512_test_epi16_mask(vectors[j], magnitude);
      if constexpr (kCode == Code::kFloat8) {
        const __m512i bits = _mm512_and_si512(vectors[j], magnitude);
        scaled = _mm512_mask_cmpneq_epi16_mask(scaled, bits, _mm512_set1_epi16(0x7fc0));
      }
      vectors[j] = _mm512_mask_add_epi16(vectors[j], scaled, vectors[j], exponent);
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
