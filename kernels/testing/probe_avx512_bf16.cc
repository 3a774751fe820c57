// Probe of AVX-512 BF16. Everything but the accessor has internal linkage; see probe_kernels.h.
#include <immintrin.h>

#include "kernels/testing/probe_kernels.h"

namespace moebius::probe {
namespace {

struct BFloat16Dot {
  using Register = __m512;
  static Register start(int chain) { return _mm512_set1_ps(1.0f + static_cast<float>(chain)); }
  static Register left() { return _mm512_castsi512_ps(_mm512_set1_epi16(0x3f80)); }   // 1.0 in bfloat16
  static Register right() { return _mm512_castsi512_ps(_mm512_set1_epi16(0x3a00)); }  // 2^-11
  static Register step(Register sum, Register left, Register right) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
  }
  static uint64_t fold(Register sum) {
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(_mm512_castps_si512(sum))));
  }
};

#include "kernels/testing/chains.inc.h"

constexpr int kChains = 20;
constexpr PeakKernel kPeaks[] = {
    {"bfloat16_avx512_bf16", RowType::kBFloat16, 2 * 32 * kChains, run_chains<BFloat16Dot, kChains>}};

}  // namespace

PeakKernels peak_kernels_avx512_bf16() { return {kPeaks, 1}; }

}  // namespace moebius::probe
