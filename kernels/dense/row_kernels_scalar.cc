// Norms, rotation, gating and attention for every machine: the reference of the vector versions.
#include <bit>
#include <cmath>
#include <type_traits>

#include "kernels/dense/row_kernels.h"
#include "kernels/format/numbers.h"

namespace moebius::dense {
namespace {

#include "kernels/dense/vec_scalar.inc.h"
#include "kernels/gemm/exponential.inc.h"
#include "kernels/dense/row_kernels.inc.h"

}  // namespace

const RowKernels& row_kernels_scalar() { return kKernels; }

}  // namespace moebius::dense
