// Rows of a grid to int8 with AVX-512, for grid_gemm.inc.h. Included INSIDE an anonymous namespace.

#include "kernels/gemm/grid_signs.inc.h"

struct GridLines {
  using Words = uint32_t __attribute__((vector_size(64)));

  static __m512i masked(__m512i words, uint32_t mask) {
    return _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(mask)));
  }
  // The eighth sign of seven in bytes, which makes the number of ones even.
  static __m512i with_eighth(__m512i bytes) {
    const __m512i odd = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m512i folded = _mm512_xor_si512(bytes, _mm512_srli_epi16(bytes, 4));
    return _mm512_or_si512(bytes, _mm512_shuffle_epi8(odd, _mm512_and_si512(folded, _mm512_set1_epi8(15))));
  }
  // Bytes 0 and 2 of two words as bytes 0 and 2 and, of the second, 1 and 3: the order of pairs() below.
  static __m512i both(__m512i first, __m512i second) { return _mm512_or_si512(first, _mm512_slli_epi16(second, 8)); }

  // Signs of each eight k in a byte, of codes with pairs in the order 0, 2, 1, 3. `more`: 16 bytes of codes that have
  // them.
  template <Code kCode>
  static __m512i signs(const std::byte* words, const std::byte* more) {
    if constexpr (kCode == Code::kIq2Xs) {
      return with_eighth(both(_mm512_srli_epi16(_mm512_loadu_si512(words), 9),
                              _mm512_srli_epi16(_mm512_loadu_si512(words + 64), 9)));
    } else if constexpr (kCode == Code::kIq2S) {
      const __m512i bytes = bytes_of(more);
      const auto last = [&](int shift, uint32_t mask) { return masked(_mm512_slli_epi32(bytes, shift), mask); };
      const __m512i first = both(_mm512_srli_epi16(_mm512_loadu_si512(words), 10),
                                 _mm512_srli_epi16(_mm512_loadu_si512(words + 64), 10));
      return _mm512_or_si512(_mm512_or_si512(first, _mm512_or_si512(last(6, 0xc0), last(20, 0xc00000))),
                             _mm512_or_si512(last(10, 0xc000), last(24, 0xc0000000)));
    } else if constexpr (kCode == Code::kIq3S) {
      const auto line = [words](int index) { return _mm512_loadu_si512(words + index * 64); };
      return signs_of_iq3_s<Words>(bytes_of(more), line(0), line(1), line(2));
    } else {
      return with_eighth(seven_signs<Words>(_mm512_loadu_si512(words + (kCode == Code::kIq3Xxs ? 128 : 64))));
    }
  }
  static __m512i bytes_of(const std::byte* at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
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

  template <Code kCode>
  static void expand(const std::byte* words, const std::byte* more, std::byte* target) {
    if constexpr (kCode == Code::kIq1S || kCode == Code::kIq1M) {
      half_of_1<kCode, 0>(words, more, target);
      half_of_1<kCode, 1>(words, more, target + 256);
    } else {
      expand_with_signs<kCode>(words, more, target);
    }
  }

  // 16 k of IQ1: rows of signed values, each eight an eighth more or less.
  template <Code kCode, int kHalf>
  static void half_of_1(const std::byte* words, const std::byte* more, std::byte* target) {
    const __m512i halves = halves_of(more), bytes = _mm512_srli_epi32(halves, kHalf * 8);
    const __m512i pair = masked(_mm512_srli_epi32(_mm512_loadu_si512(words), kHalf * 16), 0xffff);
    const __m512i second = _mm512_or_si512(_mm512_srli_epi32(pair, 11), _mm512_slli_epi32(masked(bytes, 63), 5));
    constexpr bool kIsS = kCode == Code::kIq1S;
    const __m512i is_less = kIsS ? halves : bytes;
    eight_of_1(masked(pair, 2047), is_less, kIsS ? 0x8000 : 0x40, target);
    eight_of_1(second, is_less, kIsS ? 0x8000 : 0x80, target + 128);
  }
  static void eight_of_1(__m512i numbers, __m512i is_less, int bit, std::byte* target) {
    const __mmask16 less = _mm512_test_epi32_mask(is_less, _mm512_set1_epi32(bit));
    const __m512i more = _mm512_mask_mov_epi32(_mm512_set1_epi8(1), less, _mm512_set1_epi8(-1));
    const auto* const rows = reinterpret_cast<const int32_t*>(kIq1Grid.rows);
    _mm512_storeu_si512(target, _mm512_add_epi8(_mm512_i32gather_epi32(numbers, rows, 8), more));
    _mm512_storeu_si512(target + 64, _mm512_add_epi8(_mm512_i32gather_epi32(numbers, rows + 1, 8), more));
  }
  static __m512i halves_of(const std::byte* at) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }

  // 32 k of digits to the base of 3: a third of a byte's range is a digit, and the byte times 3 has the next one.
  static void expand_digits(const std::byte* words, const std::byte* more, const std::byte* four_bits, int bit,
                            std::byte* target) {
    __m512i bytes = _mm512_loadu_si512(words);
    for (int quad = 0; quad < 5; ++quad, bytes = thrice(bytes)) store_digits(target + quad * 64, bytes);
    const __m512i two = halves_of(more);
    bytes = _mm512_or_si512(two, _mm512_slli_epi32(thrice(two), 16));
    store_digits(target + 5 * 64, bytes);
    bytes = thrice(thrice(bytes));
    store_digits(target + 6 * 64, bytes);
    const __m512i bits = _mm512_srl_epi32(bytes_of(four_bits), _mm_cvtsi32_si128(bit));
    const __m512i last = _mm512_or_si512(_mm512_slli_epi32(masked(bits, 3), 22),
                                         _mm512_slli_epi32(masked(bits, 12), 28));
    store_digits(target + 7 * 64, _mm512_or_si512(masked(thrice(thrice(bytes)), 0xffff), last));
  }
  static __m512i thrice(__m512i bytes) { return _mm512_add_epi8(_mm512_add_epi8(bytes, bytes), bytes); }
  static void store_digits(std::byte* target, __m512i bytes) {
    const __mmask64 one = _mm512_cmpgt_epi8_mask(bytes, _mm512_set1_epi8(42));
    const __mmask64 less = _mm512_cmpgt_epi8_mask(_mm512_set1_epi8(-42), bytes);
    const __m512i found = _mm512_mask_mov_epi8(_mm512_setzero_si512(), one, _mm512_set1_epi8(1));
    _mm512_storeu_si512(target, _mm512_mask_mov_epi8(found, less, _mm512_set1_epi8(-1)));
  }

  template <Code kCode>
  static void expand_with_signs(const std::byte* words, const std::byte* more, std::byte* target) {
    const __m512i signs_of_words = signs<kCode>(words, more);
    constexpr auto kBytes = std::make_integer_sequence<int, 4>();
    if constexpr (kCode == Code::kIq3Xxs) {
      expand4(_mm512_loadu_si512(words), signs_of_words, target, kBytes);
      expand4(_mm512_loadu_si512(words + 64), _mm512_srli_epi32(signs_of_words, 16), target + 256, kBytes);
    } else if constexpr (kCode == Code::kIq2Xxs) {
      expand8(_mm512_loadu_si512(words), signs_of_words, target, kBytes);
    } else if constexpr (kCode == Code::kIq3S) {
      half_of_3_s<0>(words, signs_of_words, target);
      half_of_3_s<1>(words, _mm512_srli_epi32(signs_of_words, 16), target + 256);
    } else {
      pair<kCode, 0>(_mm512_loadu_si512(words), signs_of_words, target);
      pair<kCode, 1>(_mm512_loadu_si512(words), _mm512_srli_epi32(signs_of_words, 16), target + 128);
      pair<kCode, 0>(_mm512_loadu_si512(words + 64), _mm512_srli_epi32(signs_of_words, 8), target + 256);
      pair<kCode, 1>(_mm512_loadu_si512(words + 64), _mm512_srli_epi32(signs_of_words, 24), target + 384);
    }
  }

  // 16 k of iq3_s, of which the first three numbers have a word of their own.
  template <int kHalf>
  static void half_of_3_s(const std::byte* words, __m512i signs, std::byte* target) {
    const __m512i own = _mm512_loadu_si512(words + kHalf * 128);
    const __m512i shared = _mm512_srli_epi32(_mm512_loadu_si512(words + 64), kHalf * 23);
    const auto row = [](__m512i moved) { return _mm512_i32gather_epi32(masked(moved, 511), kIq3SGrid.rows, 4); };
    store<0>(target, row(own), signs);
    store<1>(target, row(_mm512_srli_epi32(own, 10)), signs);
    store<2>(target, row(_mm512_srli_epi32(own, 23)), signs);
    store<3>(target, row(shared), signs);
  }

  // Eight k: the lower or upper half of a word, and signs in the lowest byte.
  template <Code kCode, int kHalf>
  static void pair(__m512i words, __m512i signs, std::byte* target) {
    constexpr bool kIsS = kCode == Code::kIq2S;
    const __m512i number = masked(_mm512_srli_epi32(words, kHalf * 16), kIsS ? 1023 : 511);
    const auto* const rows =
        kIsS ? reinterpret_cast<const int32_t*>(kIq2SGrid.rows) : reinterpret_cast<const int32_t*>(kIq2XsGrid.rows);
    store<0>(target, _mm512_i32gather_epi32(number, rows, 8), signs);
    store<1>(target, _mm512_i32gather_epi32(number, rows + 1, 8), signs);
  }

#ifdef __AVX512VBMI__
  // Half of the rows' places, for 64 numbers at once.
  static __m512i look_up(const uint8_t (&table)[256], __m512i numbers) {
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

  // 16 whole numbers of scales: of a line of words, or of bytes from a bit on.
  static void wholes(const std::byte* words, std::byte* target) {
    const __m512i s = _mm512_srli_epi32(_mm512_loadu_si512(words), 28);
    const __m512i whole = _mm512_or_si512(_mm512_add_epi32(s, s), _mm512_set1_epi32(1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(whole));
  }

  static void wholes_of_signs(const std::byte* more, std::byte* target) {
    const __m512i halves = halves_of(more);
    const __m512i twice =
        _mm512_or_si512(masked(_mm512_srli_epi32(halves, 5), 6), masked(_mm512_srli_epi32(halves, 11), 8));
    const __m512i whole = _mm512_or_si512(twice, _mm512_set1_epi32(1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(whole));
  }

  // Of a section of scales whose whole numbers have fewer than 8 bits.
  static void wholes_of_fields(const PanelLayout& layout, const std::byte* section, uint32_t group,
                               std::byte* target) {
    const auto field = [section, group](size_t offset, uint32_t bits) {
      const uint32_t bit = group * bits;
      const std::byte* const at = section + offset + size_t{bit / 8} * kPanelColumns;
      const __m128i moved = _mm_srl_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)),
                                          _mm_cvtsi32_si128(static_cast<int>(bit % 8)));
      return _mm_and_si128(moved, _mm_set1_epi8(static_cast<char>((1 << bits) - 1)));
    };
    __m128i s = field(layout.whole_offset, layout.whole_low_bits);
    if (layout.whole_high_bits != 0) {
      const __m128i high = field(layout.whole_high_offset, layout.whole_high_bits);
      s = _mm_or_si128(s, _mm_sll_epi16(high, _mm_cvtsi32_si128(static_cast<int>(layout.whole_low_bits))));
    }
    const __m128i whole = _mm_or_si128(_mm_add_epi8(s, s), _mm_set1_epi8(1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), whole);
  }
};
