// All product kernels, by level and format.
#pragma once

#include <vector>

#include "kernels/isa/isa.h"
#include "kernels/product/product.h"

namespace moebius {

// Kernels that can compute `format` from rows of `row_type` at level `isa`, highest level first. With
// `exact_level`, only those of the highest level at or below `isa` that has any: what forcing a level means.
std::vector<const ProductKernel*> find_products(Isa isa, const WeightFormat& format, RowType row_type,
                                                bool exact_level);

// Names of all kernels this machine can run, emulated ones last.
std::vector<const char*> product_names();

// The kernel of a name. Throws std::invalid_argument listing the names that this machine can run.
const ProductKernel& product_by_name(const char* name);

const VectorKernels& vector_kernels(Isa isa);

}  // namespace moebius
