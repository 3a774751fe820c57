// AVX-512 (F, BW, VL, DQ): float32 and int8 rows. Everything but the table's accessor has internal linkage.
#include <immintrin.h>

#include <utility>

#include "kernels/format/codebooks.h"
#include "kernels/format/grids.h"
#include "kernels/gemm/gemm.h"

namespace moebius {
namespace {

#include "kernels/gemm/vec_avx512.inc.h"

// Sixteen int32 lanes.
struct Integers {
  __m512i v;

  static Integers zero() { return {_mm512_setzero_si512()}; }
  static Integers load(const std::byte* at) { return {_mm512_loadu_si512(at)}; }
  static Integers broadcast(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
  static Integers add(Integers a, Integers b) { return {_mm512_add_epi32(a.v, b.v)}; }
  static Integers multiply_add(Integers a, Integers b, Integers sum) {
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
  }
  // Bytes 0 and 2, 1 and 3 of each word as two int16.
  Integers even_bytes() const { return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8)}; }
  Integers odd_bytes() const { return {_mm512_srai_epi16(v, 8)}; }
  // Byte j of each word, with its sign.
  template <int j>
  Vec signed_byte() const {
    const __m512i top = j == 3 ? v : _mm512_slli_epi32(v, 24 - 8 * j);
    return Vec::from_integers(_mm512_srai_epi32(top, 24));
  }
  // Half j of each word, which is a bfloat16.
  template <int j>
  Vec bfloat16_half() const {
    if constexpr (j == 0) return Vec::from_bits(_mm512_slli_epi32(v, 16));
    return Vec::from_bits(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  // See Float8Decoder; of every second byte.
  Integers even_float8_as_bfloat16() const { return as_bfloat16(_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 4)); }
  Integers odd_float8_as_bfloat16() const { return as_bfloat16(_mm512_srai_epi16(v, 4)); }
  static Integers as_bfloat16(__m512i shifted) {
    const __m512i kept = _mm512_set1_epi16(static_cast<short>(0x87f0));
    return {_mm512_ternarylogic_epi32(shifted, kept, _mm512_set1_epi16(0x3800), 0xea)};
  }
  // 2 * code - 16 (mod 256) is 0 to 236 for normal codes, 238 for NaN and 240 to 254 for subnormal ones.
  Integers float8_key() const { return {_mm512_add_epi8(_mm512_add_epi8(v, v), _mm512_set1_epi8(-16))}; }
  static Integers max_bytes(Integers a, Integers b) { return {_mm512_max_epu8(a.v, b.v)}; }
  bool any_byte_above_237() const {
    return _mm512_cmpge_epu8_mask(v, _mm512_set1_epi8(static_cast<char>(238))) != 0;
  }
  Vec to_float() const { return Vec::from_integers(v); }
  // The 16 bytes at `table` in each 128 bits, or `other` in every byte.
  static Integers bytes(const int8_t* table, int other) {
    if (table == nullptr) return {_mm512_set1_epi8(static_cast<char>(other))};
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)))};
  }
  Integers look_up(Integers places) const { return {_mm512_shuffle_epi8(v, places.v)}; }
  Integers minus_bytes(Integers other) const { return {_mm512_sub_epi8(v, other.v)}; }
  static Integers either(Integers a, Integers b) { return {_mm512_or_si512(a.v, b.v)}; }
  // Bits of each byte, moved to lower places (higher ones where kShift is negative).
  template <int kShift>
  Integers bytes_shifted(int mask) const {
    const __m512i moved = kShift < 0 ? _mm512_slli_epi16(v, kShift < 0 ? -kShift : 0)
                                     : _mm512_srli_epi16(v, kShift < 0 ? 0 : kShift);
    return {_mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(mask)))};
  }
};

// Sums of lanes 0 and 1, 2 and 3, ... of `low`, then of `high`.
Vec add_neighbours(Vec low, Vec high) {
  const __m512i lane = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 even = _mm512_permutex2var_ps(low.v, lane, high.v);
  const __m512 odd = _mm512_permutex2var_ps(low.v, _mm512_add_epi32(lane, _mm512_set1_epi32(1)), high.v);
  return {_mm512_add_ps(even, odd)};
}

constexpr int kMaxRows = 12;  // two chains each: 24 of 32 registers
// Two strips keep four chains in flight and share the rows' elements; more of them would be more streams to fetch.
constexpr int strips_together(int rows, int unit_registers) { return 2 * rows + unit_registers <= 9 ? 2 : 1; }

#include "kernels/gemm/group_scales.inc.h"
#include "kernels/gemm/decode_float32.inc.h"

// The permutation looks at the low four bits of each word only, so a shift is all that selects a nibble.
template <bool kZeros>
struct NibbleDecoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 8;
  static constexpr int kUnitRegisters = kZeros ? 2 : 1;
  explicit NibbleDecoder(const PanelLayout& layout) {
    const WeightFormat& format = layout.format;
    const float first = kZeros || format.mins ? 0.0f : -8.0f;
    const __m512 integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (format.code >= Code::kIq4) {
      const Codebook& book = codebook_of(format.code);
      const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(book.values));
      table = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(values)), _mm512_set1_ps(book.unit));
      return;
    }
    table = format.code == Code::kFloat4
                ? _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f)
                : _mm512_add_ps(integers, _mm512_set1_ps(first));
  }

  struct Unit {
    Integers words;
    Vec zero;
  };
  static Unit load(const std::byte* at, size_t, Vec zero) { return {Integers::load(at), zero}; }
  template <int j>
  Vec value(const Unit& unit) const {
    const __m512i index = j == 0 ? unit.words.v : _mm512_srli_epi32(unit.words.v, j / 2 * 4 + j % 2 * 16);
    const Vec value{_mm512_permutexvar_ps(index, table)};
    return kZeros ? Vec::sub(value, unit.zero) : value;
  }

  __m512 table;
};

using Int4Decoder = NibbleDecoder<false>;
using Int4ZerosDecoder = NibbleDecoder<true>;
using Float4Decoder = NibbleDecoder<false>;
using Iq4Decoder = NibbleDecoder<false>;

#include "kernels/gemm/float32_gemm.inc.h"
#include "kernels/gemm/int8_gemm.inc.h"
#include "kernels/gemm/grid_lines.inc.h"
#include "kernels/gemm/grid_gemm.inc.h"

constexpr Isa kIsa = static_cast<Isa>(2);  // Isa::kAvx512; isa.h has more than declarations
constexpr GemmKernel kFloat32{"avx512_float32", kIsa,         RowType::kFloat32, 0, 0,
                              supports_or_expands<supports_float32>, scratch_or_expands<scratch_float32>,
                              run_or_expands<run_float32>};
constexpr GemmKernel kInt8{"avx512_int8", kIsa, RowType::kInt8, 0, 0, supports_int8, scratch_int8, run_int8};
constexpr const GemmKernel* kKernels[] = {&kFloat32, &kInt8};

}  // namespace

GemmKernels gemms_avx512() { return {kKernels, 2}; }

}  // namespace moebius
