// Requantising with vectors of 8 float32.
#include "kernels/format/requantise_kernels.h"

namespace moebius {
namespace {

constexpr int kLanes = 8;
#include "kernels/format/requantise_loops.inc.h"

}  // namespace

const RequantiseKernels& requantise_avx2() { return kKernels; }

}  // namespace moebius
