// Activations, scatter and conversions with AVX-512 (F, BW, VL, DQ). Everything but the accessor has internal linkage.
#include <immintrin.h>

#include "kernels/gemm/gemm.h"

namespace moebius {
namespace {

constexpr Isa kIsa = static_cast<Isa>(2);  // Isa::kAvx512; isa.h has more than declarations

#include "kernels/gemm/vec_avx512.inc.h"
#include "kernels/gemm/exponential.inc.h"
#include "kernels/gemm/vector_kernels.inc.h"

}  // namespace

const VectorKernels& vector_kernels_avx512() { return kKernels; }

}  // namespace moebius
