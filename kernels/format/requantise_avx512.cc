// Requantising with vectors of 16 float32.
#include "kernels/format/requantise_kernels.h"

namespace moebius {
namespace {

constexpr int kLanes = 16;
#include "kernels/format/requantise_loops.inc.h"

}  // namespace

const RequantiseKernels& requantise_avx512() { return kKernels; }

}  // namespace moebius
