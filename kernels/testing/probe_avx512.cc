// Probes of AVX-512 (F, BW, VL, DQ). Everything but the accessors has internal linkage; see probe_kernels.h.
#include <immintrin.h>

#include "kernels/testing/probe_kernels.h"

namespace moebius::probe {
namespace {

using Register = __m512i;
Register load(const std::byte* at) { return _mm512_load_si512(at); }
Register merge(Register a, Register b) { return _mm512_xor_si512(a, b); }
uint64_t fold(Register a) { return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(a))); }

#include "kernels/testing/read_block.inc.h"

constexpr ReadKernel kRead = {{read_block<_MM_HINT_T0>, read_block<_MM_HINT_T1>, read_block<_MM_HINT_NTA>}};

struct FloatFma {
  using Register = __m512;
  static Register start(int chain) { return _mm512_set1_ps(1.0f + static_cast<float>(chain)); }
  static Register left() { return _mm512_set1_ps(0.5f); }
  static Register right() { return _mm512_set1_ps(1.0f); }
  static Register step(Register sum, Register left, Register right) { return _mm512_fmadd_ps(sum, left, right); }
  static uint64_t fold(Register sum) {
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(_mm512_castps_si512(sum))));
  }
};

// u8 x s8 pairs to 16 bits, pairs of those to 32 bits, then the sum.
struct Int8Madd {
  using Register = __m512i;
  static Register start(int chain) { return _mm512_set1_epi32(chain); }
  static Register left() { return _mm512_set1_epi8(3); }
  static Register right() { return _mm512_set1_epi8(1); }
  static Register step(Register sum, Register left, Register right) {
    Register product;
    // Volatile, or the product would be computed once for all chains: its operands never change.
    __asm__ volatile("vpmaddubsw %2, %1, %0" : "=v"(product) : "v"(left), "v"(right));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(product, right));
  }
  static uint64_t fold(Register sum) { return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(sum))); }
};

#include "kernels/testing/chains.inc.h"

constexpr int kChains = 20;
constexpr PeakKernel kPeaks[] = {
    {"float32_avx512", RowType::kFloat32, 2 * 16 * kChains, run_chains<FloatFma, kChains>},
    {"int8_avx512", RowType::kInt8, 2 * 64 * kChains, run_chains<Int8Madd, kChains>}};

}  // namespace

const ReadKernel& read_kernel_avx512() { return kRead; }
PeakKernels peak_kernels_avx512() { return {kPeaks, 2}; }

}  // namespace moebius::probe
