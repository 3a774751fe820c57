// AVX2, FMA and F16C: float32 and int8 rows, and bfloat16 rows by codes with group scales. Everything but the table's
// accessor has internal linkage.
#include <immintrin.h>

#include <utility>

#include "kernels/format/codebooks.h"
#include "kernels/format/grids.h"
#include "kernels/gemm/gemm.h"

namespace moebius {
namespace {

#include "kernels/gemm/vec_avx2.inc.h"

// Eight int32 lanes.
struct Integers {
  __m256i v;

  static Integers zero() { return {_mm256_setzero_si256()}; }
  static Integers load(const std::byte* at) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))}; }
  static Integers broadcast(uint32_t pair) { return {_mm256_set1_epi32(static_cast<int>(pair))}; }
  static Integers from_float(Vec x) { return {_mm256_cvtps_epi32(x.v)}; }
  void store(std::byte* at) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), v); }
  static Integers multiply(Integers a, Integers b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
  static Integers max(Integers a, Integers b) { return {_mm256_max_epi32(a.v, b.v)}; }
  static Integers absolute_bits(Vec x) {
    return {_mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7fffffff))};
  }
  // Of absolute_bits(): that of the largest value, or a NaN.
  float largest_bits() const {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, _MM_SHUFFLE(1, 0, 3, 2)));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtss_f32(_mm_castsi128_ps(x));
  }
  int32_t sum() const {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, _MM_SHUFFLE(2, 3, 0, 1))));
  }
  // Eight int16, of each four of them with the middle ones `swapped`.
  void store_words(int16_t* at, bool swapped) const {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    if (swapped) words = _mm_shuffle_epi8(words, order);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), words);
  }
  // Bits 4 j to 4 j + 3 of each half of a word.
  template <int j>
  Integers nibbles() const {
    const __m256i moved = j == 0 ? v : _mm256_srli_epi16(v, 4 * j);
    return {j == 3 ? moved : _mm256_and_si256(moved, _mm256_set1_epi16(15))};
  }
  static Integers add(Integers a, Integers b) { return {_mm256_add_epi32(a.v, b.v)}; }
  static Integers multiply_add(Integers a, Integers b, Integers sum) {
    return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v))};
  }
  // Has this computed before what follows: gcc would begin so much at once that registers do not last.
  void keep() { asm volatile("" : "+x"(v)); }
  // Bytes 0 and 2, 1 and 3 of each word as two int16.
  Integers even_bytes() const { return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8)}; }
  Integers odd_bytes() const { return {_mm256_srai_epi16(v, 8)}; }
  // Byte j of each word, with its sign.
  template <int j>
  Vec signed_byte() const {
    const __m256i top = j == 3 ? v : _mm256_slli_epi32(v, 24 - 8 * j);
    return Vec::from_integers(_mm256_srai_epi32(top, 24));
  }
  // Half j of each word, which is a bfloat16.
  template <int j>
  Vec bfloat16_half() const {
    if constexpr (j == 0) return Vec::from_bits(_mm256_slli_epi32(v, 16));
    return Vec::from_bits(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  // See Float8Decoder; of every second byte.
  Integers even_float8_as_bfloat16() const { return as_bfloat16(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 4)); }
  Integers odd_float8_as_bfloat16() const { return as_bfloat16(_mm256_srai_epi16(v, 4)); }
  static Integers as_bfloat16(__m256i shifted) {
    const __m256i kept = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0x87f0)));
    return {_mm256_or_si256(kept, _mm256_set1_epi16(0x3800))};
  }
  // 2 * code - 16 (mod 256) is 0 to 236 for normal codes, 238 for NaN and 240 to 254 for subnormal ones.
  Integers float8_key() const { return {_mm256_add_epi8(_mm256_add_epi8(v, v), _mm256_set1_epi8(-16))}; }
  static Integers max_bytes(Integers a, Integers b) { return {_mm256_max_epu8(a.v, b.v)}; }
  bool any_byte_above_237() const {
    const __m256i above = _mm256_subs_epu8(v, _mm256_set1_epi8(static_cast<char>(237)));
    return _mm256_testz_si256(above, above) == 0;
  }
  Vec to_float() const { return Vec::from_integers(v); }
  // The 16 bytes at `table` in each 128 bits, or `other` in every byte.
  static Integers bytes(const int8_t* table, int other) {
    if (table == nullptr) return {_mm256_set1_epi8(static_cast<char>(other))};
    return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)))};
  }
  Integers look_up(Integers places) const { return {_mm256_shuffle_epi8(v, places.v)}; }
  Integers minus_bytes(Integers other) const { return {_mm256_sub_epi8(v, other.v)}; }
  static Integers either(Integers a, Integers b) { return {_mm256_or_si256(a.v, b.v)}; }
  // Bits of each byte, moved to lower places (higher ones where kShift is negative).
  template <int kShift>
  Integers bytes_shifted(int mask) const {
    const __m256i moved = kShift < 0 ? _mm256_slli_epi16(v, kShift < 0 ? -kShift : 0)
                                     : _mm256_srli_epi16(v, kShift < 0 ? 0 : kShift);
    return {_mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)))};
  }
};

// Sums of lanes 0 and 1, 2 and 3, ... of `low`, then of `high`.
Vec add_neighbours(Vec low, Vec high) {
  // Columns 0 1 4 5 | 2 3 6 7, put in order at the end.
  const __m256 even = _mm256_shuffle_ps(low.v, high.v, _MM_SHUFFLE(2, 0, 2, 0));
  const __m256 odd = _mm256_shuffle_ps(low.v, high.v, _MM_SHUFFLE(3, 1, 3, 1));
  const __m256d sum = _mm256_castps_pd(_mm256_add_ps(even, odd));
  return {_mm256_castpd_ps(_mm256_permute4x64_pd(sum, _MM_SHUFFLE(3, 1, 2, 0)))};
}

constexpr int kMaxRows = 6;  // two chains each: 12 of 16 registers
// Two strips, a whole panel, while registers last.
constexpr int strips_together(int rows, int unit_registers) { return 2 * rows + unit_registers <= 6 ? 2 : 1; }

#include "kernels/gemm/group_scales.inc.h"
#include "kernels/gemm/decode_float32.inc.h"

// Nibbles become bytes by one table look-up for 32 of them: twice the value for e2m1, halved again by finish().
template <bool kZeros, bool kFloat>
struct NibbleDecoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 8;
  static constexpr int kUnitRegisters = 2;
  explicit NibbleDecoder(const PanelLayout& layout) {
    const WeightFormat& format = layout.format;
    const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i bytes = kFloat ? _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
                                 : _mm_sub_epi8(codes, _mm_set1_epi8(format.mins ? 0 : 8));
    table = _mm256_broadcastsi128_si256(bytes);
    if (format.code >= Code::kIq4) table = Integers::bytes(codebook_of(format.code).values, 0).v;
  }

  // Bytes 0..3 of `low` are k, k+4, k+1, k+5; of `high` k+2, k+6, k+3, k+7.
  struct Unit {
    Integers low;
    Integers high;
  };
  Unit load(const std::byte* at, size_t, Vec zero) const {
    const __m256i words = Integers::load(at).v;
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i low = _mm256_and_si256(words, mask);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(words, 4), mask);
    if constexpr (kZeros) {
      const __m256i whole = _mm256_mullo_epi32(_mm256_cvtps_epi32(zero.v), _mm256_set1_epi32(0x01010101));
      return {{_mm256_sub_epi8(low, whole)}, {_mm256_sub_epi8(high, whole)}};
    }
    return {{_mm256_shuffle_epi8(table, low)}, {_mm256_shuffle_epi8(table, high)}};
  }
  template <int j>
  Vec value(const Unit& unit) const {
    return (j / 2 % 2 == 0 ? unit.low : unit.high).template signed_byte<j / 4 + j % 2 * 2>();
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
using Iq4Decoder = NibbleDecoder<false, false>;

#include "kernels/gemm/decode_grid.inc.h"
#include "kernels/gemm/float32_gemm.inc.h"
#include "kernels/gemm/int8_gemm.inc.h"
#include "kernels/gemm/dot_words.inc.h"

// Rows of a grid as well, which AVX-512 expands (grid_gemm.inc.h).
void run_float32_or_grid(const GemmWork& work) {
  switch (work.layout->format.code) {
    case Code::kIq3Xxs: return run<GridDecoder<Code::kIq3Xxs>>(work);
    case Code::kIq3S: return run<GridDecoder<Code::kIq3S>>(work);
    case Code::kIq2Xxs: return run<GridDecoder<Code::kIq2Xxs>>(work);
    case Code::kIq2Xs: return run<GridDecoder<Code::kIq2Xs>>(work);
    case Code::kIq2S: return run<GridDecoder<Code::kIq2S>>(work);
    case Code::kIq1S: return run<GridDecoder<Code::kIq1S>>(work);
    case Code::kIq1M: return run<GridDecoder<Code::kIq1M>>(work);
    case Code::kTq1: return run<GridDecoder<Code::kTq1>>(work);
    default: return run_float32(work);
  }
}

constexpr Isa kIsa = static_cast<Isa>(1);  // Isa::kAvx2; isa.h has more than declarations
constexpr GemmKernel kFloat32{"avx2_float32", kIsa,         RowType::kFloat32, 0, 0,
                              supports_float32, scratch_float32, run_float32_or_grid};
constexpr GemmKernel kInt8{"avx2_int8", kIsa, RowType::kInt8, 0, 0, supports_int8, scratch_int8, run_int8};
constexpr GemmKernel kWords{"avx2_words",  kIsa, RowType::kBFloat16, 0, 0,
                            supports_words, scratch_words, run_words, word_row_bytes, prepare_words};
constexpr const GemmKernel* kKernels[] = {&kFloat32, &kInt8, &kWords};

}  // namespace

GemmKernels gemms_avx2() { return {kKernels, 3}; }

}  // namespace moebius
