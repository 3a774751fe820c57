// AVX2 + FMA. Everything but the table's accessor has internal linkage; see panel_kernels.inc.h.
#include <immintrin.h>

#include <utility>

#include "kernels/moe/kernel_table.h"

namespace moebius {
namespace {

struct Vec {
  static constexpr uint32_t kLanes = 8;
  static constexpr int kMaxRows = 6;  // 12 accumulators and 3 operands of 16 registers

  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec load(const float* at) { return {_mm256_loadu_ps(at)}; }
  static Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  void store(float* at) const { _mm256_storeu_ps(at, v); }

  static void load_pairs(const uint32_t* at, Vec& low, Vec& high) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    low.v = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    high.v = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  // at[0..min(kLanes, columns)) += scale * x
  static void add_scaled(float* at, Vec scale, Vec x, uint32_t columns) {
    if (columns >= kLanes) {
      _mm256_storeu_ps(at, _mm256_fmadd_ps(scale.v, x.v, _mm256_loadu_ps(at)));
      return;
    }
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(columns)), lane);
    _mm256_maskstore_ps(at, mask, _mm256_fmadd_ps(scale.v, x.v, _mm256_maskload_ps(at, mask)));
  }

  // As in moe_avx512.cc; 2^n is built in the exponent bits, where n stays within [-126, 127].
  static __m256 exp(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), kNearest);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 y = _mm256_set1_ps(1.0f / 5040);
    constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float c : kTaylor) {
      y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(c));
    }
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
  }

  static Vec silu_times(Vec gate, Vec up) {
    const __m256 e = exp(_mm256_sub_ps(_mm256_setzero_ps(), gate.v));
    return {_mm256_mul_ps(_mm256_div_ps(gate.v, _mm256_add_ps(_mm256_set1_ps(1.0f), e)), up.v)};
  }
};

#include "kernels/moe/panel_kernels.inc.h"

}  // namespace

const KernelTable& kernel_table_avx2() { return kTable; }

}  // namespace moebius
