// Activations, scatter and conversions with AVX2, FMA and F16C. Everything but the accessor has internal linkage.
#include <immintrin.h>

#include "kernels/gemm/gemm.h"

namespace moebius {
namespace {

constexpr Isa kIsa = static_cast<Isa>(1);  // Isa::kAvx2; isa.h has more than declarations

#include "kernels/gemm/vec_avx2.inc.h"
#include "kernels/gemm/exponential.inc.h"
#include "kernels/gemm/vector_kernels.inc.h"

}  // namespace

const VectorKernels& vector_kernels_avx2() { return kKernels; }

}  // namespace moebius
