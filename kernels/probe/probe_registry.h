// The probes that a level may run.
#pragma once

#include <string>
#include <vector>

#include "kernels/isa/isa.h"
#include "kernels/probe/probe_kernels.h"

namespace moebius::probe {

// The widest loads at or below `isa`, which supported_isas() must list.
const ReadKernel& read_kernel(Isa isa);

// Compute units at or below `isa`, lowest level first; `isa` must be one that supported_isas() lists.
std::vector<PeakKernel> peak_kernels(Isa isa);

// The unit of a name. Throws std::invalid_argument listing the units this machine has.
PeakKernel peak_kernel(const std::string& name);

}  // namespace moebius::probe
