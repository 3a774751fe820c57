// AVX-512 (F, BW, VL, DQ). Everything but the table's accessor has internal linkage; see panel_kernels.inc.h.
#include <immintrin.h>

#include <utility>

#include "kernels/moe/kernel_table.h"

namespace moebius {
namespace {

struct Vec {
  static constexpr uint32_t kLanes = 16;
  static constexpr int kMaxRows = 8;  // 16 accumulators and 3 operands of 32 registers

  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec load(const float* at) { return {_mm512_loadu_ps(at)}; }
  static Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  void store(float* at) const { _mm512_storeu_ps(at, v); }

  static void load_pairs(const uint32_t* at, Vec& low, Vec& high) {
    const __m512i pairs = _mm512_loadu_si512(at);
    low.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    high.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  // at[0..min(kLanes, columns)) += scale * x
  static void add_scaled(float* at, Vec scale, Vec x, uint32_t columns) {
    const auto mask = static_cast<__mmask16>(columns >= kLanes ? 0xffffu : (1u << columns) - 1);
    _mm512_mask_storeu_ps(at, mask, _mm512_fmadd_ps(scale.v, x.v, _mm512_maskz_loadu_ps(mask, at)));
  }

  // exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln2/2: Taylor to r^7 (relative error < 2e-8 before
  // rounding). ln 2 is split in two so that r is exact. The clamp keeps 2^n finite; NaN passes through it.
  static __m512 exp(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 5040);
    constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float c : kTaylor) {
      y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    }
    return _mm512_scalef_ps(y, n);
  }

  static Vec silu_times(Vec gate, Vec up) {
    const __m512 e = exp(_mm512_sub_ps(_mm512_setzero_ps(), gate.v));
    return {_mm512_mul_ps(_mm512_div_ps(gate.v, _mm512_add_ps(_mm512_set1_ps(1.0f), e)), up.v)};
  }
};

#include "kernels/moe/panel_kernels.inc.h"

}  // namespace

const KernelTable& kernel_table_avx512() { return kTable; }

}  // namespace moebius
