// Norms, rotation, gating and attention with AVX2, FMA and F16C. Everything but the accessor has internal linkage.
#include "kernels/dense/row_kernels.h"

#include <immintrin.h>

#include <type_traits>

namespace moebius::dense {
namespace {

#include "kernels/gemm/vec_avx2.inc.h"
#include "kernels/gemm/exponential.inc.h"

float sum_of(Vec x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

#include "kernels/dense/row_kernels.inc.h"

}  // namespace

const RowKernels& row_kernels_avx2() { return kKernels; }

}  // namespace moebius::dense
