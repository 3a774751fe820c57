// Rows of a grid to int8 with AVX-512, for grid_gemm.inc.h. Included INSIDE an anonymous namespace.

struct GridLines {
  // Signs of each eight k in a byte, of which seven bits are stored.
  static __m512i signs(const std::byte* words) {
    const __m512i word = _mm512_loadu_si512(words);
    const auto field = [](__m512i moved, int place) {
      return _mm512_and_si512(moved, _mm512_set1_epi32(0x7f << (8 * place)));
    };
    __m512i bytes = _mm512_or_si512(field(word, 0), field(_mm512_slli_epi32(word, 1), 1));
    bytes = _mm512_or_si512(bytes, field(_mm512_slli_epi32(word, 2), 2));
    bytes = _mm512_or_si512(bytes, field(_mm512_slli_epi32(word, 3), 3));
    const __m512i odd = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m512i folded = _mm512_xor_si512(bytes, _mm512_srli_epi16(bytes, 4));
    return _mm512_or_si512(bytes, _mm512_shuffle_epi8(odd, _mm512_and_si512(folded, _mm512_set1_epi8(15))));
  }

  // Of magnitudes of four k, kQuad of eight, with `signs`.
  template <int kQuad>
  static __m512i with_signs(__m512i magnitudes, __m512i signs) {
    const __m512i order = _mm512_add_epi8(
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)),
        _mm512_set1_epi8(kQuad / 2));
    const __m512i bit = _mm512_set1_epi32(kQuad % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010u));
    const __mmask64 negative = _mm512_test_epi8_mask(_mm512_shuffle_epi8(signs, order), bit);
    return _mm512_mask_sub_epi8(magnitudes, negative, _mm512_setzero_si512(), magnitudes);
  }

  template <int kQuad>
  static void store(std::byte* target, __m512i magnitudes, __m512i signs) {
    _mm512_storeu_si512(target + kQuad * 64, with_signs<kQuad>(magnitudes, signs));
  }

  template <int kBits>
  static void expand(const std::byte* words, std::byte* target) {
    const __m512i signs_of_words = signs(words + (kBits - 1) * 64);
    constexpr auto kBytes = std::make_integer_sequence<int, 4>();
    if constexpr (kBits == 3) {
      expand4(_mm512_loadu_si512(words), signs_of_words, target, kBytes);
      expand4(_mm512_loadu_si512(words + 64), _mm512_srli_epi32(signs_of_words, 16), target + 256, kBytes);
    } else {
      expand8(_mm512_loadu_si512(words), signs_of_words, target, kBytes);
    }
  }

#ifdef __AVX512VBMI__
  // Half of the rows' places, for 64 numbers at once.
  static __m512i look_up(const uint8_t (&table)[kGridRows], __m512i numbers) {
    const auto part = [&](int i) { return _mm512_load_si512(table + i * 64); };
    const __m512i low = _mm512_permutex2var_epi8(part(0), numbers, part(1));
    const __m512i high = _mm512_permutex2var_epi8(part(2), numbers, part(3));
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(numbers), high);
  }

  // Fields of four k become a byte each, whose upper bits are others': the table says the same whatever they are.
  static __m512i magnitudes(__m512i fields, __m512i offsets, __m512i table) {
    return _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(offsets, fields), table);
  }

  template <int... kBytes>
  static void expand4(__m512i numbers, __m512i signs, std::byte* target, std::integer_sequence<int, kBytes...>) {
    // Four columns are neighbours, then come their next numbers.
    const __m512i by_number =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i order = _mm512_shuffle_epi8(numbers, by_number);
    const __m512i first = look_up(kIq3XxsPlaces.first, order), second = look_up(kIq3XxsPlaces.second, order);
    // 16 bits of four columns, then of their next numbers.
    const __m512i low = _mm512_unpacklo_epi8(first, second), high = _mm512_unpackhi_epi8(first, second);
    const __m512i offsets =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60));
    const __m512i table = _mm512_set1_epi64(0x1f1a16120e0a0602);
    store<0>(target, magnitudes(_mm512_unpacklo_epi64(low, low), offsets, table), signs);
    store<1>(target, magnitudes(_mm512_unpackhi_epi64(low, low), offsets, table), signs);
    store<2>(target, magnitudes(_mm512_unpacklo_epi64(high, high), offsets, table), signs);
    store<3>(target, magnitudes(_mm512_unpackhi_epi64(high, high), offsets, table), signs);
  }

  template <int... kBytes>
  static void expand8(__m512i numbers, __m512i signs, std::byte* target, std::integer_sequence<int, kBytes...>) {
    const __m512i first = look_up(kIq2XxsPlaces.first, numbers), second = look_up(kIq2XxsPlaces.second, numbers);
    const __m512i table = _mm512_set1_epi32(8 | 25 << 8 | 43 << 16);
    const auto offsets = [](int byte) {
      const __m512i of_columns = _mm512_set1_epi64(0x2624222006040200);
      return _mm512_add_epi8(of_columns, _mm512_set1_epi8(static_cast<char>(byte * 8)));
    };
    ((store<2 * kBytes>(target, magnitudes(first, offsets(kBytes), table), signs),
      store<2 * kBytes + 1>(target, magnitudes(second, offsets(kBytes), table), signs)),
     ...);
  }
#else
  template <int... kBytes>
  static void expand4(__m512i numbers, __m512i signs, std::byte* target, std::integer_sequence<int, kBytes...>) {
    (store<kBytes>(target, _mm512_i32gather_epi32(number<kBytes>(numbers), kIq3XxsGrid.rows, 4), signs), ...);
  }

  template <int... kBytes>
  static void expand8(__m512i numbers, __m512i signs, std::byte* target, std::integer_sequence<int, kBytes...>) {
    const auto* const rows = reinterpret_cast<const int32_t*>(kIq2XxsGrid.rows);
    ((store<2 * kBytes>(target, _mm512_i32gather_epi32(number<kBytes>(numbers), rows, 8), signs),
      store<2 * kBytes + 1>(target, _mm512_i32gather_epi32(number<kBytes>(numbers), rows + 1, 8), signs)),
     ...);
  }

  template <int kByte>
  static __m512i number(__m512i numbers) {
    return _mm512_and_si512(_mm512_srli_epi32(numbers, 8 * kByte), _mm512_set1_epi32(255));
  }
#endif

  static void wholes(const std::byte* words, std::byte* target) {
    const __m512i s = _mm512_srli_epi32(_mm512_loadu_si512(words), 28);
    const __m512i whole = _mm512_or_si512(_mm512_add_epi32(s, s), _mm512_set1_epi32(1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(whole));
  }
};
