// Requantising with vectors of 4 float32.
#include "kernels/format/requantise_kernels.h"

namespace moebius {
namespace {

constexpr int kLanes = 4;
#include "kernels/format/requantise_loops.inc.h"

}  // namespace

const RequantiseKernels& requantise_scalar() { return kKernels; }

}  // namespace moebius
