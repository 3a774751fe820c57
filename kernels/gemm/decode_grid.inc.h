// Rows of a grid as signed bytes, times what finish() takes off again: decoders of dot_words.inc.h and of
// float32_gemm.inc.h. Included INSIDE an anonymous namespace, after decode_float32.inc.h.

#include "kernels/gemm/grid_signs.inc.h"

// Codes whose units are 16 k, half of what shares bytes of signs, because they have groups of 16: words of two pairs.
template <Code kCode>
constexpr bool kIsPaired = kCode == Code::kIq2Xs || kCode == Code::kIq2S;
template <Code kCode>
constexpr uint32_t kGridLines = kCode == Code::kIq3Xxs || kCode == Code::kIq3S ? 3 : 2;

struct GridBytes {
  using Words = uint32_t __attribute__((vector_size(32)));

  static __m256i load(const std::byte* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  static __m256i masked(__m256i words, uint32_t mask) {
    return _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(mask)));
  }
  // The eighth sign of seven in bytes, which makes the number of ones even.
  static __m256i with_eighth(__m256i bytes) {
    const __m256i odd = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i folded = _mm256_xor_si256(bytes, _mm256_srli_epi16(bytes, 4));
    return _mm256_or_si256(bytes, _mm256_shuffle_epi8(odd, _mm256_and_si256(folded, _mm256_set1_epi8(15))));
  }

  // Eight columns: the signs of each eight k in a byte, of pairs in bytes 0 and 2. `more`: eight bytes, of codes that
  // have them; `bit`: where those of 16 k begin.
  template <Code kCode>
  static __m256i signs(const std::byte* words, const std::byte* more, uint32_t bit) {
    if constexpr (kCode == Code::kIq2Xs) return with_eighth(_mm256_srli_epi16(load(words), 9));
    if constexpr (kCode == Code::kIq2S) {
      const __m256i bytes = _mm256_srl_epi32(bytes_of(more), _mm_cvtsi32_si128(static_cast<int>(bit)));
      const __m256i last = _mm256_or_si256(masked(_mm256_slli_epi32(bytes, 6), 0xc0),
                                           masked(_mm256_slli_epi32(bytes, 20), 0xc00000));
      return _mm256_or_si256(_mm256_srli_epi16(load(words), 10), last);
    }
    if constexpr (kCode == Code::kIq3S) {
      return signs_of_iq3_s<Words>(bytes_of(more), load(words), load(words + 64), load(words + 128));
    }
    return with_eighth(seven_signs<Words>(load(words + (kGridLines<kCode> - 1) * 64)));
  }
  static __m256i bytes_of(const std::byte* at) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
  }

  // Of magnitudes of four k, kQuad of eight, or of four of pairs, with `signs`.
  template <int kQuad, bool kPaired>
  static __m256i with_signs(__m256i magnitudes, __m256i signs) {
    const __m256i order = _mm256_add_epi8(
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)),
        _mm256_set1_epi8(kPaired ? kQuad / 2 * 2 : kQuad / 2));
    const __m256i bit = _mm256_set1_epi32(kQuad % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010u));
    const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(signs, order), bit), bit);
    return _mm256_sub_epi8(_mm256_xor_si256(magnitudes, negative), negative);
  }

  static uint32_t byte_at(const std::byte* at) { return static_cast<uint8_t>(*at); }
  static uint32_t half_at(const std::byte* at) {
    uint16_t half;
    __builtin_memcpy(&half, at, sizeof half);
    return half;
  }

  // Number kRow of one column's words. Fields that are no bytes begin where one operation makes an address of them.
  template <Code kCode, int kRow>
  static uint32_t number(const std::byte* words) {
    if constexpr (kCode == Code::kIq3Xxs) return byte_at(words + kRow / 4 * 64 + kRow % 4);
    if constexpr (kCode == Code::kIq2Xxs) return byte_at(words + kRow);
    if constexpr (kCode == Code::kIq2Xs) return half_at(words + kRow * 2) & 511;
    if constexpr (kCode == Code::kIq2S) return half_at(words + kRow * 2) & 1023;
    const std::byte* const own = words + kRow / 4 * 128;
    if constexpr (kRow % 4 == 0) return half_at(own) & 511;
    if constexpr (kRow % 4 == 1) return half_at(own + 1) >> 2 & 511;
    if constexpr (kRow % 4 == 2) return half_at(own + 2) >> 7;
    return kRow == 3 ? half_at(words + 64) & 511 : half_at(words + 66) >> 7;
  }

  // Rows of eight columns' words; narrow loads, which do not cross lines, and blends, which any port does.
  template <Code kCode, int kRow>
  static __m256i row4(const std::byte* words) {
    const uint32_t place = number<kCode, kRow>(words);
    if constexpr (kCode == Code::kIq3S) return _mm256_set1_epi32(static_cast<int>(kIq3SGrid.rows[place]));
    return _mm256_set1_epi32(static_cast<int>(kIq3XxsGrid.rows[place]));
  }
  template <Code kCode, int kRow>
  static __m256i rows4(const std::byte* at) {
    const auto row = [at](int column) { return row4<kCode, kRow>(at + 4 * column); };
    const __m256i first = _mm256_blend_epi32(row(0), row(1), 0x02);
    const __m256i second = _mm256_blend_epi32(row(2), row(3), 0x08);
    const __m256i third = _mm256_blend_epi32(row(4), row(5), 0x20);
    const __m256i fourth = _mm256_blend_epi32(row(6), row(7), 0x80);
    return _mm256_blend_epi32(_mm256_blend_epi32(first, second, 0x0c), _mm256_blend_epi32(third, fourth, 0xc0), 0xf0);
  }
  template <Code kCode, int kRow>
  static __m256i row8(const std::byte* words) {
    const uint32_t place = number<kCode, kRow>(words);
    if constexpr (kCode == Code::kIq2Xs) return _mm256_set1_epi64x(static_cast<long long>(kIq2XsGrid.rows[place]));
    if constexpr (kCode == Code::kIq2S) return _mm256_set1_epi64x(static_cast<long long>(kIq2SGrid.rows[place]));
    return _mm256_set1_epi64x(static_cast<long long>(kIq2XxsGrid.rows[place]));
  }
  // Columns 0, 1, 4 and 5, of eight k each.
  template <Code kCode, int kRow>
  static __m256 rows8(const std::byte* at) {
    const auto row = [at](int column) { return row8<kCode, kRow>(at + 4 * column); };
    const __m256i low = _mm256_blend_epi32(row(0), row(1), 0x0c);
    const __m256i high = _mm256_blend_epi32(row(4), row(5), 0xc0);
    return _mm256_castsi256_ps(_mm256_blend_epi32(low, high, 0xf0));
  }

  // k+4 kQuad, ..., k+4 kQuad+3 of eight columns, of the words of a unit.
  template <Code kCode, int kQuad>
  static __m256i magnitudes(const std::byte* words) {
    if constexpr (kGridLines<kCode> == 3) {
      return rows4<kCode, kQuad>(words);
    } else {
      const __m256 first = rows8<kCode, kQuad / 2>(words), second = rows8<kCode, kQuad / 2>(words + 8);
      constexpr int kHalf = kQuad % 2 == 0 ? _MM_SHUFFLE(2, 0, 2, 0) : _MM_SHUFFLE(3, 1, 3, 1);
      return _mm256_castps_si256(_mm256_shuffle_ps(first, second, kHalf));
    }
  }
};

// 32 k or, of pairs, 16; decoded where they are multiplied, since registers do not hold them.
template <Code kCode>
struct GridUnit {
  static constexpr uint32_t kK = kIsPaired<kCode> ? 16 : 32;
  static constexpr uint32_t kBytes = 2 * kK * kGridLines<kCode>;
  const std::byte* words;
  __m256i signs;

  template <int kQuad>
  Integers quad() const {
    const __m256i magnitudes = GridBytes::magnitudes<kCode, kQuad>(words);
    return {GridBytes::with_signs<kQuad, kIsPaired<kCode>>(magnitudes, signs)};
  }
};

// 16 k of IQ1: rows of signed values, each eight an eighth more or less.
template <Code kCode>
struct Iq1Unit {
  static constexpr uint32_t kK = 16;
  static constexpr uint32_t kBytes = 32;
  const std::byte* words;  // the half of a column's word
  const std::byte* more;   // the column's byte of two
  __m256i less;            // bits 6 and 7 of every byte: the first and the second eight are an eighth less

  // `line`, of the eight columns, and `more`: their words and halves; `half`: which 16 k of these.
  static Iq1Unit of(const std::byte* line, const std::byte* more, uint32_t half) {
    const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(more)));
    if constexpr (kCode == Code::kIq1S) {
      return {line + half * 2, more + half, _mm256_srai_epi32(_mm256_slli_epi32(halves, 16), 31)};
    }
    const __m256i order = _mm256_add_epi8(
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)),
        _mm256_set1_epi8(static_cast<char>(half)));
    return {line + half * 2, more + half, _mm256_shuffle_epi8(halves, order)};
  }

  template <int kRow>
  __m256i row(int column) const {
    const uint32_t half = GridBytes::half_at(words + 4 * column);
    const uint32_t number =
        kRow == 0 ? half & 2047 : half >> 11 | (GridBytes::byte_at(more + 2 * column) & 63) << 5;
    return _mm256_set1_epi64x(static_cast<long long>(kIq1Grid.rows[number]));
  }
  // Columns `first`, the next one, and those four further on.
  template <int kRow>
  __m256 rows(int first) const {
    const __m256i low = _mm256_blend_epi32(row<kRow>(first), row<kRow>(first + 1), 0x0c);
    const __m256i high = _mm256_blend_epi32(row<kRow>(first + 4), row<kRow>(first + 5), 0xc0);
    return _mm256_castsi256_ps(_mm256_blend_epi32(low, high, 0xf0));
  }
  template <int kQuad>
  Integers quad() const {
    constexpr int kHalf = kQuad % 2 == 0 ? _MM_SHUFFLE(2, 0, 2, 0) : _MM_SHUFFLE(3, 1, 3, 1);
    const __m256i values = _mm256_castps_si256(_mm256_shuffle_ps(rows<kQuad / 2>(0), rows<kQuad / 2>(2), kHalf));
    const __m256i bit = _mm256_set1_epi8(static_cast<char>(kQuad < 2 ? 0x40 : 0x80));
    const __m256i is_less = _mm256_cmpeq_epi8(_mm256_and_si256(less, bit), bit);
    return {_mm256_add_epi8(values, _mm256_or_si256(is_less, _mm256_set1_epi8(1)))};
  }
};
template <>
struct GridUnit<Code::kIq1S> : Iq1Unit<Code::kIq1S> {};
template <>
struct GridUnit<Code::kIq1M> : Iq1Unit<Code::kIq1M> {};

// 32 k of digits to the base of 3: a third of a byte's range is a digit, and the byte times 3 has the next one.
template <>
struct GridUnit<Code::kTq1> {
  static constexpr uint32_t kK = 32;
  static constexpr uint32_t kBytes = 64;
  __m256i words;  // four bytes of each column
  __m256i more;   // two, and these times 3
  __m256i last;   // in the upper half two digits that stand alone

  // `line`, of the eight columns, their halves, and bytes of which bits from `bit` on are theirs.
  static GridUnit of(const std::byte* line, const std::byte* halves, const std::byte* four_bits, int bit) {
    const __m256i two = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
    const __m256i bits = _mm256_srl_epi32(GridBytes::bytes_of(four_bits), _mm_cvtsi32_si128(bit));
    const __m256i last = _mm256_or_si256(_mm256_slli_epi32(GridBytes::masked(bits, 3), 22),
                                         _mm256_slli_epi32(GridBytes::masked(bits, 12), 28));
    return {GridBytes::load(line), _mm256_or_si256(two, _mm256_slli_epi32(times<1>(two), 16)), last};
  }
  // Bytes times 3 to the power of kPower.
  template <int kPower>
  static __m256i times(__m256i bytes) {
    if constexpr (kPower == 0) {
      return bytes;
    } else {
      const __m256i before = times<kPower - 1>(bytes);
      return _mm256_add_epi8(_mm256_add_epi8(before, before), before);
    }
  }
  template <int kQuad>
  Integers quad() const {
    if constexpr (kQuad < 5) return digits(times<kQuad>(words));
    const __m256i found = times<kQuad < 5 ? 0 : kQuad * 2 - 10>(more);
    return digits(kQuad < 7 ? found : _mm256_blend_epi16(found, last, 0xaa));
  }
  static Integers digits(__m256i bytes) {
    const __m256i one = _mm256_cmpgt_epi8(bytes, _mm256_set1_epi8(42));
    return {_mm256_sub_epi8(_mm256_cmpgt_epi8(_mm256_set1_epi8(-42), bytes), one)};
  }
};

// Finds the bytes of signs that go with words.
template <Code kCode>
struct GridSigns {
  using Unit = GridUnit<kCode>;
  size_t offset;
  size_t halves_bytes;  // of tq1, before its 4 bits

  explicit GridSigns(const PanelLayout& layout) : offset(layout.signs_offset), halves_bytes(layout.k_padded) {}
  Unit unit(const std::byte* words, size_t k) const {
    if constexpr (kCode == Code::kTq1) {
      const size_t column = reinterpret_cast<uintptr_t>(words) % 64 / 4, chunk = k / 32;
      const std::byte* const signs = words - column * 4 - chunk * 64 + offset;
      return Unit::of(words, signs + (chunk * kPanelColumns + column) * 2,
                      signs + halves_bytes + chunk / 2 * kPanelColumns + column, static_cast<int>(chunk % 2 * 4));
    } else if constexpr (kCode == Code::kIq1S || kCode == Code::kIq1M) {
      const size_t half = k / 16 % 2;
      const std::byte* const line = words - half * Unit::kBytes;
      const size_t column = reinterpret_cast<uintptr_t>(line) % 64 / 4, chunk = k / 32;
      const std::byte* const panel = line - column * 4 - chunk * 64;
      const std::byte* const signs = panel + offset + (chunk * kPanelColumns + column) * 2;
      return {Iq1Unit<kCode>::of(line, signs, static_cast<uint32_t>(half))};
    } else {
      return signed_unit(words, k);
    }
  }
  Unit signed_unit(const std::byte* words, size_t k) const {
    const std::byte* more = nullptr;
    if constexpr (kCode == Code::kIq3S || kCode == Code::kIq2S) {
      // A column's words begin in a line where the column does in the panel.
      const size_t column = reinterpret_cast<uintptr_t>(words) % 64 / 4;
      const std::byte* const panel = words - column * 4 - k / Unit::kK * Unit::kBytes;
      more = panel + offset + k / 32 * kPanelColumns + column;
    }
    return {words, GridBytes::signs<kCode>(words, more, static_cast<uint32_t>(k / 4 & 4))};
  }
};

template <Code kCode>
struct GridDecoder : PlainRow {
  using Unit = GridUnit<kCode>;
  static constexpr uint32_t kUnitBytes = Unit::kBytes;
  static constexpr uint32_t kUnitK = Unit::kK;
  static constexpr int kUnitRegisters = 4;
  explicit GridDecoder(const PanelLayout& layout) : signs(layout) {}

  Unit load(const std::byte* at, size_t k, Vec) const { return signs.unit(at, k); }
  template <int j>
  static Vec value(const Unit& unit) {
    return unit.template quad<j / 4>().template signed_byte<j % 4>();
  }
  static Vec finish(Vec even, Vec odd) { return Vec::mul(Vec::add(even, odd), Vec::broadcast(kGridUnit<kCode>)); }

  GridSigns<kCode> signs;
};
