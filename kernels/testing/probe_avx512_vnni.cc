// Probe of AVX-512 VNNI. Everything but the accessor has internal linkage; see probe_kernels.h.
#include <immintrin.h>

#include "kernels/testing/probe_kernels.h"

namespace moebius::probe {
namespace {

struct Int8Dot {
  using Register = __m512i;
  static Register start(int chain) { return _mm512_set1_epi32(chain); }
  static Register left() { return _mm512_set1_epi8(3); }
  static Register right() { return _mm512_set1_epi8(1); }
  static Register step(Register sum, Register left, Register right) {
    return _mm512_dpbusd_epi32(sum, left, right);
  }
  static uint64_t fold(Register sum) { return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(sum))); }
};

#include "kernels/testing/chains.inc.h"

constexpr int kChains = 20;
constexpr PeakKernel kPeaks[] = {
    {"int8_avx512_vnni", RowType::kInt8, 2 * 64 * kChains, run_chains<Int8Dot, kChains>}};

}  // namespace

PeakKernels peak_kernels_avx512_vnni() { return {kPeaks, 1}; }

}  // namespace moebius::probe
