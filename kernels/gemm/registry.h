// All GEMM kernels, by level and format.
#pragma once

#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/isa/isa.h"

namespace moebius {

// Kernels that can compute `format` from rows of `row_type` at level `isa`, highest level first. With
// `exact_level`, only those of the highest level at or below `isa` that has any: what forcing a level means.
std::vector<const GemmKernel*> find_gemms(Isa isa, const WeightFormat& format, RowType row_type,
                                                bool exact_level);

// All kernels that this machine can run, lowest level first.
std::vector<const GemmKernel*> runnable_gemms();

// The kernel of a name, one of `kernels`. Throws std::invalid_argument listing their names.
const GemmKernel& gemm_by_name(const char* name, const std::vector<const GemmKernel*>& kernels = runnable_gemms());

const VectorKernels& vector_kernels(Isa isa);

}  // namespace moebius
