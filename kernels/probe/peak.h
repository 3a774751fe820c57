// What the compute units of some cpus give when operands never leave the registers.
#pragma once

#include <vector>

#include "kernels/probe/probe_kernels.h"

namespace moebius::probe {

// Operations (multiplications and additions) per second that one pinned thread per cpu does together; best of
// several rounds that last about `seconds` together. Throws std::invalid_argument for cpus that can not be used
// or seconds outside 0.001 to 60.
double measure_peak(const PeakKernel& kernel, const std::vector<int>& cpus, double seconds);

}  // namespace moebius::probe
