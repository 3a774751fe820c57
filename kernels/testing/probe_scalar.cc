// Probes of the baseline: SSE2. Everything but the accessors has internal linkage; see probe_kernels.h.
#include <immintrin.h>

#include "kernels/testing/probe_kernels.h"

namespace moebius::probe {
namespace {

using Register = __m128i;
Register load(const std::byte* at) { return _mm_load_si128(reinterpret_cast<const Register*>(at)); }
Register merge(Register a, Register b) { return _mm_xor_si128(a, b); }
uint64_t fold(Register a) { return static_cast<uint64_t>(_mm_cvtsi128_si64(a)); }

#include "kernels/testing/read_block.inc.h"

constexpr ReadKernel kRead = {{read_block<_MM_HINT_T0>, read_block<_MM_HINT_T1>, read_block<_MM_HINT_NTA>}};

struct MultiplyAdd {
  using Register = __m128;
  static Register start(int chain) { return _mm_set1_ps(1.0f + static_cast<float>(chain)); }
  static Register left() { return _mm_set1_ps(0.5f); }
  static Register right() { return _mm_set1_ps(1.0f); }
  static Register step(Register sum, Register left, Register right) {
    return _mm_add_ps(_mm_mul_ps(sum, left), right);
  }
  static uint64_t fold(Register sum) { return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_castps_si128(sum))); }
};

#include "kernels/testing/chains.inc.h"

constexpr int kChains = 12;
constexpr PeakKernel kPeaks[] = {
    {"float32_scalar", RowType::kFloat32, 2 * 4 * kChains, run_chains<MultiplyAdd, kChains>}};

}  // namespace

const ReadKernel& read_kernel_scalar() { return kRead; }
PeakKernels peak_kernels_scalar() { return {kPeaks, 1}; }

}  // namespace moebius::probe
