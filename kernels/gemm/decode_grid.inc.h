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

  // Row `number` of eight columns' words; narrow loads, which do not cross lines, and blends, which any port does.
  static __m256i row4(const std::byte* number) {
    return _mm256_set1_epi32(static_cast<int>(kIq3XxsGrid.rows[static_cast<uint8_t>(*number)]));
  }
  static __m256i rows4(const std::byte* at) {
    const __m256i first = _mm256_blend_epi32(row4(at), row4(at + 4), 0x02);
    const __m256i second = _mm256_blend_epi32(row4(at + 8), row4(at + 12), 0x08);
    const __m256i third = _mm256_blend_epi32(row4(at + 16), row4(at + 20), 0x20);
    const __m256i fourth = _mm256_blend_epi32(row4(at + 24), row4(at + 28), 0x80);
    return _mm256_blend_epi32(_mm256_blend_epi32(first, second, 0x0c), _mm256_blend_epi32(third, fourth, 0xc0), 0xf0);
  }
  static __m256i row8(const std::byte* number) {
    return _mm256_set1_epi64x(static_cast<long long>(kIq2XxsGrid.rows[static_cast<uint8_t>(*number)]));
  }
  // Columns 0, 1, 4 and 5, of eight k each.
  static __m256 rows8(const std::byte* at) {
    const __m256i low = _mm256_blend_epi32(row8(at), row8(at + 4), 0x0c);
    const __m256i high = _mm256_blend_epi32(row8(at + 16), row8(at + 20), 0xc0);
    return _mm256_castsi256_ps(_mm256_blend_epi32(low, high, 0xf0));
  }

  // k+4 kQuad, ..., k+4 kQuad+3 of eight columns, of the words of 32 k.
  template <int kBits, int kQuad>
  static __m256i magnitudes(const std::byte* words) {
    if constexpr (kBits == 3) return rows4(words + kQuad / 4 * 64 + kQuad % 4);
    const __m256 first = rows8(words + kQuad / 2), second = rows8(words + kQuad / 2 + 8);
    constexpr int kHalf = kQuad % 2 == 0 ? _MM_SHUFFLE(2, 0, 2, 0) : _MM_SHUFFLE(3, 1, 3, 1);
    return _mm256_castps_si256(_mm256_shuffle_ps(first, second, kHalf));
  }
};

// 32 k, which share a line of signs; decoded where they are multiplied, since registers do not hold them.
template <int kBits>
struct GridUnit {
  const std::byte* words;
  __m256i signs;

  static GridUnit at(const std::byte* words) { return {words, GridBytes::signs(words + (kBits - 1) * 64)}; }
  template <int kQuad>
  Integers quad() const {
    return {GridBytes::with_signs<kQuad>(GridBytes::magnitudes<kBits, kQuad>(words), signs)};
  }
};

template <int kBits>
struct GridDecoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64 * kBits;
  static constexpr uint32_t kUnitK = 32;
  static constexpr int kUnitRegisters = 4;
  explicit GridDecoder(const WeightFormat&) {}

  using Unit = GridUnit<kBits>;
  static Unit load(const std::byte* at, size_t, Vec) { return Unit::at(at); }
  template <int j>
  static Vec value(const Unit& unit) {
    return unit.template quad<j / 4>().template signed_byte<j % 4>();
  }
  static Vec finish(Vec even, Vec odd) {
    return Vec::mul(Vec::add(even, odd), Vec::broadcast(kBits == 3 ? kIq3XxsUnit : kIq2XxsUnit));
  }
};
