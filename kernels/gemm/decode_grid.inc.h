// Rows of a grid as signed bytes, times what finish() takes off again: decoders of dot_words.inc.h and of
// float32_gemm.inc.h. Included INSIDE an anonymous namespace, after decode_float32.inc.h.

struct GridBytes {
  // Eight columns. The signs of each eight k in a byte, of which seven bits are stored.
  static __m256i signs(const std::byte* words) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    const auto field = [](__m256i moved, int place) {
      return _mm256_and_si256(moved, _mm256_set1_epi32(0x7f << (8 * place)));
    };
    __m256i bytes = _mm256_or_si256(field(word, 0), field(_mm256_slli_epi32(word, 1), 1));
    bytes = _mm256_or_si256(bytes, field(_mm256_slli_epi32(word, 2), 2));
    bytes = _mm256_or_si256(bytes, field(_mm256_slli_epi32(word, 3), 3));
    const __m256i odd = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i folded = _mm256_xor_si256(bytes, _mm256_srli_epi16(bytes, 4));
    return _mm256_or_si256(bytes, _mm256_shuffle_epi8(odd, _mm256_and_si256(folded, _mm256_set1_epi8(15))));
  }

  // Of magnitudes of four k, kQuad of eight, with `signs`.
  template <int kQuad>
  static __m256i with_signs(__m256i magnitudes, __m256i signs) {
    const __m256i order = _mm256_add_epi8(
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)),
        _mm256_set1_epi8(kQuad / 2));
    const __m256i bit = _mm256_set1_epi32(kQuad % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010u));
    const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(signs, order), bit), bit);
    return _mm256_sub_epi8(_mm256_xor_si256(magnitudes, negative), negative);
  }

  static int row4(const std::byte* number) {
    return static_cast<int>(kIq3XxsGrid.rows[static_cast<uint8_t>(*number)]);
  }
  // Of byte kByte of eight words.
  template <int kByte>
  static __m256i rows4(const std::byte* words) {
    const std::byte* const at = words + kByte;
    return _mm256_setr_epi32(row4(at), row4(at + 4), row4(at + 8), row4(at + 12), row4(at + 16), row4(at + 20),
                             row4(at + 24), row4(at + 28));
  }
  static long long row8(const std::byte* number) {
    return static_cast<long long>(kIq2XxsGrid.rows[static_cast<uint8_t>(*number)]);
  }
  // Columns 0, 1, 4 and 5, of eight k each.
  static __m256i rows8(const std::byte* at) {
    return _mm256_setr_epi64x(row8(at), row8(at + 4), row8(at + 16), row8(at + 20));
  }

  // Of the words of 32 k those of half kHalf: vector i has k+4i, ..., k+4i+3 of eight columns.
  template <int kBits, int kHalf>
  static void decode(const std::byte* words, Integers (&vectors)[4]) {
    const __m256i all = signs(words + (kBits - 1) * 64);
    if constexpr (kBits == 3) {
      decode4<kHalf>(words + kHalf * 64, all, vectors, std::make_integer_sequence<int, 4>());
    } else {
      decode8<kHalf * 2>(words, all, vectors[0], vectors[1]);
      decode8<kHalf * 2 + 1>(words, all, vectors[2], vectors[3]);
    }
  }

  template <int kHalf, int... kBytes>
  static void decode4(const std::byte* words, __m256i all, Integers (&vectors)[4],
                      std::integer_sequence<int, kBytes...>) {
    ((vectors[kBytes].v = with_signs<kHalf * 4 + kBytes>(rows4<kBytes>(words), all)), ...);
  }

  template <int kByte>
  static void decode8(const std::byte* words, __m256i all, Integers& low, Integers& high) {
    // Columns 0 1 4 5, then 2 3 6 7.
    const __m256 first = _mm256_castsi256_ps(rows8(words + kByte));
    const __m256 second = _mm256_castsi256_ps(rows8(words + kByte + 8));
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0)));
    const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(first, second, _MM_SHUFFLE(3, 1, 3, 1)));
    low.v = with_signs<2 * kByte>(even, all);
    high.v = with_signs<2 * kByte + 1>(odd, all);
  }
};

// 16 k at a time, of the 32 that share a line of signs.
template <int kBits>
struct GridDecoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 32 * kBits;
  static constexpr uint32_t kUnitK = 16;
  static constexpr int kUnitRegisters = 4;
  explicit GridDecoder(const WeightFormat&) {}

  struct Unit {
    Integers vectors[4];
  };
  [[gnu::always_inline]] static Unit load(const std::byte* at, size_t k, Vec) {
    Unit unit;
    if (k % 32 == 0) {
      GridBytes::decode<kBits, 0>(at, unit.vectors);
    } else {
      GridBytes::decode<kBits, 1>(at - kUnitBytes, unit.vectors);
    }
    return unit;
  }
  template <int j>
  static Vec value(const Unit& unit) {
    return unit.vectors[j / 4].template signed_byte<j % 4>();
  }
  static Vec finish(Vec even, Vec odd) {
    return Vec::mul(Vec::add(even, odd), Vec::broadcast(kBits == 3 ? kIq3XxsUnit : kIq2XxsUnit));
  }
};
