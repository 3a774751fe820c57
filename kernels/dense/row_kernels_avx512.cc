// Norms, rotation, gating and attention with AVX-512 (F, BW, VL, DQ). Everything but the accessor has internal linkage.
#include "kernels/dense/row_kernels.h"

#include <immintrin.h>

#include <type_traits>

namespace moebius::dense {
namespace {

#include "kernels/gemm/vec_avx512.inc.h"
#include "kernels/gemm/exponential.inc.h"

float sum_of(Vec x) { return _mm512_reduce_add_ps(x.v); }

#include "kernels/dense/row_kernels.inc.h"

}  // namespace

const RowKernels& row_kernels_avx512() { return kKernels; }

}  // namespace moebius::dense
