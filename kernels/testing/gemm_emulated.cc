#include "kernels/testing/gemm_emulated.h"

namespace moebius {

std::vector<const GemmKernel*> testable_gemms() {
  std::vector<const GemmKernel*> found = runnable_gemms();
  if (supported_isas().back() < Isa::kAvx512Bf16) return found;
  const GemmKernels emulated = gemms_amx_emulated();
  found.insert(found.end(), emulated.kernels, emulated.kernels + emulated.count);
  return found;
}

}  // namespace moebius
