// Codes -> float32 with AVX2: the decoders of decode_float32_avx512.inc.h, for half a line (eight columns) at a time.
// Included INSIDE an anonymous namespace, after vec_avx2.inc.h.

struct PlainRow {
  static constexpr bool kRareCodes = false;
  template <int j>
  static Vec row(const float* row) {
    return Vec::broadcast(row[j]);
  }
  static Vec finish(Vec even, Vec odd) { return Vec::add(even, odd); }
};

__m256i load_words(const std::byte* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

// Byte j of each word, with its sign.
template <int j>
Vec signed_byte(__m256i words) {
  const __m256i top = j == 3 ? words : _mm256_slli_epi32(words, 24 - 8 * j);
  return Vec::from_integers(_mm256_srai_epi32(top, 24));
}

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
    __m256i words;
  };
  static Unit load(const std::byte* at, Vec) { return {load_words(at)}; }
  template <int j>
  Vec value(const Unit& unit) const {
    if constexpr (j == 0) return Vec::from_bits(_mm256_slli_epi32(unit.words, 16));
    return Vec::from_bits(_mm256_and_si256(unit.words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};

// Lanes alternate between even and odd k: value 0 holds columns 0-3, value 1 columns 4-7 (of eight).
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
    return Vec::from_float16(unit.at + j * 16);
  }
  template <int j>
  static Vec row(const float* row) {
    return Vec::broadcast_pair(row);
  }
  static Vec finish(Vec low, Vec high) {
    // Columns 0 1 4 5 | 2 3 6 7, put in order at the end.
    const __m256 even = _mm256_shuffle_ps(low.v, high.v, _MM_SHUFFLE(2, 0, 2, 0));
    const __m256 odd = _mm256_shuffle_ps(low.v, high.v, _MM_SHUFFLE(3, 1, 3, 1));
    const __m256d sum = _mm256_castps_pd(_mm256_add_ps(even, odd));
    return {_mm256_castpd_ps(_mm256_permute4x64_pd(sum, _MM_SHUFFLE(3, 1, 2, 0)))};
  }
};

// As with AVX-512: see there.
struct Float8Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 4;
  static constexpr int kUnitRegisters = 2;
  static constexpr bool kRareCodes = true;
  explicit Float8Decoder(const WeightFormat&) {}

  struct Unit {
    __m256i even;
    __m256i odd;
    __m256i key;
  };
  static __m256i as_bfloat16(__m256i shifted) {
    const __m256i kept = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0x87f0)));
    return _mm256_or_si256(kept, _mm256_set1_epi16(0x3800));
  }
  static Unit load(const std::byte* at, Vec) {
    const __m256i words = load_words(at);
    return {as_bfloat16(_mm256_srai_epi16(_mm256_slli_epi16(words, 8), 4)), as_bfloat16(_mm256_srai_epi16(words, 4)),
            _mm256_add_epi8(_mm256_add_epi8(words, words), _mm256_set1_epi8(-16))};
  }
  template <int kStrips>
  static bool any_rare(const Unit (&units)[kStrips]) {
    __m256i largest = units[0].key;
    for (int s = 1; s < kStrips; ++s) largest = _mm256_max_epu8(largest, units[s].key);
    const __m256i above = _mm256_subs_epu8(largest, _mm256_set1_epi8(static_cast<char>(237)));
    return _mm256_testz_si256(above, above) == 0;
  }
  static Vec repair(Vec value) { return fix_float8(value); }
  template <int j>
  Vec value(const Unit& unit) const {
    const __m256i pairs = j % 2 == 0 ? unit.even : unit.odd;
    if constexpr (j < 2) return Vec::from_bits(_mm256_slli_epi32(pairs, 16));
    return Vec::from_bits(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static Vec finish(Vec even, Vec odd) { return Vec::mul(Vec::add(even, odd), Vec::broadcast(256.0f)); }
};

struct Int8Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 4;
  static constexpr int kUnitRegisters = 1;
  explicit Int8Decoder(const WeightFormat&) {}

  struct Unit {
    __m256i words;
  };
  static Unit load(const std::byte* at, Vec) { return {load_words(at)}; }
  template <int j>
  Vec value(const Unit& unit) const {
    return signed_byte<j>(unit.words);
  }
};

// Nibbles become bytes by one table look-up for 32 of them: twice the value for e2m1, halved again by finish().
template <bool kZeros, bool kFloat>
struct NibbleDecoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 8;
  static constexpr int kUnitRegisters = 2;
  explicit NibbleDecoder(const WeightFormat& format) {
    const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i bytes = kFloat ? _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
                                 : _mm_sub_epi8(codes, _mm_set1_epi8(format.mins ? 0 : 8));
    table = _mm256_broadcastsi128_si256(bytes);
  }

  // Bytes 0..3 of `low` are k, k+4, k+1, k+5; of `high` k+2, k+6, k+3, k+7.
  struct Unit {
    __m256i low;
    __m256i high;
  };
  Unit load(const std::byte* at, Vec zero) const {
    const __m256i words = load_words(at);
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i low = _mm256_and_si256(words, mask);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(words, 4), mask);
    if constexpr (kZeros) {
      const __m256i whole = _mm256_mullo_epi32(_mm256_cvtps_epi32(zero.v), _mm256_set1_epi32(0x01010101));
      return {_mm256_sub_epi8(low, whole), _mm256_sub_epi8(high, whole)};
    }
    return {_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high)};
  }
  template <int j>
  Vec value(const Unit& unit) const {
    return signed_byte<j / 4 + j % 2 * 2>(j / 2 % 2 == 0 ? unit.low : unit.high);
  }
  static Vec finish(Vec even, Vec odd) {
    const Vec sum = Vec::add(even, odd);
    return kFloat ? Vec::mul(sum, Vec::broadcast(0.5f)) : sum;
  }

  __m256i table;
};

using Int4Decoder = NibbleDecoder<false, false>;
using Int4ZerosDecoder = NibbleDecoder<true, false>;
using Float4Decoder = NibbleDecoder<false, true>;
