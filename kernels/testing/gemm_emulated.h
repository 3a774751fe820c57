// GEMM kernels that only tests run, by name: the loops of tile kernels over tiles kept in memory, for machines without AMX.
#pragma once

#include <vector>

#include "kernels/gemm/registry.h"

namespace moebius {

GemmKernels gemms_amx_emulated();  // kernels/testing/gemm_amx_emulated.cc; needs AVX-512 BF16

// runnable_gemms(), then the emulated ones where this machine can run them.
std::vector<const GemmKernel*> testable_gemms();

}  // namespace moebius
