// AVX2, FMA and F16C: float32 and int8 rows. Everything but the table's accessor has internal linkage.
#include <immintrin.h>

#include <utility>

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
  static Integers add(Integers a, Integers b) { return {_mm256_add_epi32(a.v, b.v)}; }
  static Integers multiply_add(Integers a, Integers b, Integers sum) {
    return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v))};
  }
  // Bytes 0 and 2, 1 and 3 of each word as two int16.
  Integers even_bytes() const { return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8)}; }
  Integers odd_bytes() const { return {_mm256_srai_epi16(v, 8)}; }
  Vec to_float() const { return Vec::from_integers(v); }
};

constexpr int kMaxRows = 6;  // two chains each: 12 of 16 registers
// Two strips, a whole panel, while registers last.
constexpr int strips_together(int rows, int unit_registers) { return 2 * rows + unit_registers <= 6 ? 2 : 1; }

#include "kernels/gemm/group_scales.inc.h"
#include "kernels/gemm/decode_float32_avx2.inc.h"
#include "kernels/gemm/float32_gemm.inc.h"
#include "kernels/gemm/int8_gemm.inc.h"

constexpr Isa kIsa = static_cast<Isa>(1);  // Isa::kAvx2; isa.h has more than declarations
constexpr GemmKernel kFloat32{"avx2_float32", kIsa,         RowType::kFloat32, 0, 0,
                                 supports_float32, scratch_float32, run_float32};
constexpr GemmKernel kInt8{"avx2_int8", kIsa, RowType::kInt8, 0, 0, supports_int8, scratch_int8, run_int8};
constexpr const GemmKernel* kKernels[] = {&kFloat32, &kInt8};

}  // namespace

GemmKernels gemms_avx2() { return {kKernels, 2}; }

}  // namespace moebius
