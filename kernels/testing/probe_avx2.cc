// Probes of AVX2 and FMA. Everything but the accessors has internal linkage; see probe_kernels.h.
#include <immintrin.h>

#include "kernels/testing/probe_kernels.h"

namespace moebius::probe {
namespace {

using Register = __m256i;
Register load(const std::byte* at) { return _mm256_load_si256(reinterpret_cast<const Register*>(at)); }
Register merge(Register a, Register b) { return _mm256_xor_si256(a, b); }
uint64_t fold(Register a) { return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(a))); }

#include "kernels/testing/read_block.inc.h"

constexpr ReadKernel kRead = {{read_block<_MM_HINT_T0>, read_block<_MM_HINT_T1>, read_block<_MM_HINT_NTA>}};

struct FloatFma {
  using Register = __m256;
  static Register start(int chain) { return _mm256_set1_ps(1.0f + static_cast<float>(chain)); }
  static Register left() { return _mm256_set1_ps(0.5f); }
  static Register right() { return _mm256_set1_ps(1.0f); }
  static Register step(Register sum, Register left, Register right) { return _mm256_fmadd_ps(sum, left, right); }
  static uint64_t fold(Register sum) {
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(_mm256_castps_si256(sum))));
  }
};

// u8 x s8 pairs to 16 bits, pairs of those to 32 bits, then the sum.
struct Int8Madd {
  using Register = __m256i;
  static Register start(int chain) { return _mm256_set1_epi32(chain); }
  static Register left() { return _mm256_set1_epi8(3); }
  static Register right() { return _mm256_set1_epi8(1); }
  static Register step(Register sum, Register left, Register right) {
    Register product;
    // Volatile, or the product would be computed once for all chains: its operands never change.
    __asm__ volatile("vpmaddubsw %2, %1, %0" : "=v"(product) : "v"(left), "v"(right));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(product, right));
  }
  static uint64_t fold(Register sum) { return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(sum))); }
};

#include "kernels/testing/chains.inc.h"

constexpr int kChains = 12;
constexpr PeakKernel kPeaks[] = {
    {"float32_avx2", RowType::kFloat32, 2 * 8 * kChains, run_chains<FloatFma, kChains>},
    {"int8_avx2", RowType::kInt8, 2 * 32 * kChains, run_chains<Int8Madd, kChains>}};

}  // namespace

const ReadKernel& read_kernel_avx2() { return kRead; }
PeakKernels peak_kernels_avx2() { return {kPeaks, 2}; }

}  // namespace moebius::probe
