// Codes -> float32 with AVX-512. Included INSIDE an anonymous namespace, after vec_avx512.inc.h.
//
// A decoder takes one unit (kUnitBytes of a panel, kUnitK of k) and gives value<j>() for j in 0..kUnitK-1, to be
// multiplied with row<j>(). Chain j % 2 adds them up; finish() makes one sum of the two chains. A unit stays in
// kUnitRegisters while it is used.

struct PlainRow {
  static constexpr bool kRareCodes = false;
  template <int j>
  static Vec row(const float* row) {
    return Vec::broadcast(row[j]);
  }
  static Vec finish(Vec even, Vec odd) { return Vec::add(even, odd); }
};

struct Float32Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 128;
  static constexpr uint32_t kUnitK = 2;
  static constexpr int kUnitRegisters = 0;
  explicit Float32Decoder(const WeightFormat&) {}

  struct Unit {
    const float* at;
  };
  static Unit load(const std::byte* at, Vec) { return {reinterpret_cast<const float*>(at)}; }
  template <int j>
  Vec value(const Unit& unit) const {
    return Vec::load(unit.at + j * kPanelColumns);
  }
};

struct BFloat16Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 2;
  static constexpr int kUnitRegisters = 1;
  explicit BFloat16Decoder(const WeightFormat&) {}

  struct Unit {
    __m512i words;
  };
  static Unit load(const std::byte* at, Vec) { return {_mm512_loadu_si512(at)}; }
  template <int j>
  Vec value(const Unit& unit) const {
    if constexpr (j == 0) return Vec::from_bits(_mm512_slli_epi32(unit.words, 16));
    return Vec::from_bits(_mm512_and_si512(unit.words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};

// Lanes alternate between even and odd k, so that a conversion takes its eight columns straight from memory: value
// 0 holds columns 0-7, value 1 columns 8-15, and chains mean halves of the panel until finish().
struct Float16Decoder {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 2;
  static constexpr int kUnitRegisters = 0;
  static constexpr bool kRareCodes = false;
  explicit Float16Decoder(const WeightFormat&) {}

  struct Unit {
    const std::byte* at;
  };
  static Unit load(const std::byte* at, Vec) { return {at}; }
  template <int j>
  Vec value(const Unit& unit) const {
    return Vec::from_float16(unit.at + j * 32);
  }
  template <int j>
  static Vec row(const float* row) {
    return Vec::broadcast_pair(row);
  }
  static Vec finish(Vec low, Vec high) {
    const __m512i lane = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 even = _mm512_permutex2var_ps(low.v, lane, high.v);
    const __m512 odd = _mm512_permutex2var_ps(low.v, _mm512_add_epi32(lane, _mm512_set1_epi32(1)), high.v);
    return {_mm512_add_ps(even, odd)};
  }
};

// e4m3 seeeemmm becomes the bfloat16 s0111eeeemmm0000: 2^-8 times its value where it is normal. Subnormal codes,
// zero and NaN are rare in trained weights and repaired in a branch.
struct Float8Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 4;
  static constexpr int kUnitRegisters = 2;
  static constexpr bool kRareCodes = true;
  explicit Float8Decoder(const WeightFormat&) {}

  struct Unit {
    __m512i even;
    __m512i odd;
    __m512i key;
  };
  static __m512i as_bfloat16(__m512i shifted) {
    return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16(static_cast<short>(0x87f0)), _mm512_set1_epi16(0x3800),
                                     0xea);
  }
  static Unit load(const std::byte* at, Vec) {
    const __m512i words = _mm512_loadu_si512(at);
    return {as_bfloat16(_mm512_srai_epi16(_mm512_slli_epi16(words, 8), 4)), as_bfloat16(_mm512_srai_epi16(words, 4)),
            _mm512_add_epi8(_mm512_add_epi8(words, words), _mm512_set1_epi8(-16))};
  }
  // 2 * code - 16 (mod 256) is 0 to 236 for normal codes, 238 for NaN and 240 to 254 for subnormal ones.
  template <int kStrips>
  static bool any_rare(const Unit (&units)[kStrips]) {
    __m512i largest = units[0].key;
    for (int s = 1; s < kStrips; ++s) largest = _mm512_max_epu8(largest, units[s].key);
    return _mm512_cmpge_epu8_mask(largest, _mm512_set1_epi8(static_cast<char>(238))) != 0;
  }
  static Vec repair(Vec value) { return fix_float8(value); }
  template <int j>
  Vec value(const Unit& unit) const {
    const __m512i pairs = j % 2 == 0 ? unit.even : unit.odd;
    if constexpr (j < 2) return Vec::from_bits(_mm512_slli_epi32(pairs, 16));
    return Vec::from_bits(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static Vec finish(Vec even, Vec odd) { return Vec::mul(Vec::add(even, odd), Vec::broadcast(256.0f)); }
};

struct Int8Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 4;
  static constexpr int kUnitRegisters = 1;
  explicit Int8Decoder(const WeightFormat&) {}

  struct Unit {
    __m512i words;
  };
  static Unit load(const std::byte* at, Vec) { return {_mm512_loadu_si512(at)}; }
  template <int j>
  Vec value(const Unit& unit) const {
    const __m512i top = j == 3 ? unit.words : _mm512_slli_epi32(unit.words, 24 - 8 * j);
    return Vec::from_integers(_mm512_srai_epi32(top, 24));
  }
};

// The permutation looks at the low four bits of each word only, so a shift is all that selects a nibble.
template <bool kZeros>
struct NibbleDecoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 8;
  static constexpr int kUnitRegisters = kZeros ? 2 : 1;
  explicit NibbleDecoder(const WeightFormat& format) {
    const float first = kZeros || format.mins ? 0.0f : -8.0f;
    const __m512 integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    table = format.code == Code::kFloat4
                ? _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f)
                : _mm512_add_ps(integers, _mm512_set1_ps(first));
  }

  struct Unit {
    __m512i words;
    Vec zero;
  };
  static Unit load(const std::byte* at, Vec zero) { return {_mm512_loadu_si512(at), zero}; }
  template <int j>
  Vec value(const Unit& unit) const {
    const __m512i index = j == 0 ? unit.words : _mm512_srli_epi32(unit.words, j / 2 * 4 + j % 2 * 16);
    const Vec value{_mm512_permutexvar_ps(index, table)};
    return kZeros ? Vec::sub(value, unit.zero) : value;
  }

  __m512 table;
};

using Int4Decoder = NibbleDecoder<false>;
using Int4ZerosDecoder = NibbleDecoder<true>;
using Float4Decoder = NibbleDecoder<false>;
