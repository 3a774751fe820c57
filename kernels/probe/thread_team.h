// Pinned threads that begin a measurement together.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace moebius::probe {

// Runs work(i) on one new thread per entry of `cpus`, thread i pinned to cpus[i]; all begin once all are there.
// Returns the seconds from the first one's begin to the last one's end. Throws std::invalid_argument for an
// empty list, a negative cpu, or one that a thread can not be pinned to. `work` must not throw.
double run_together(const std::vector<int>& cpus, const std::function<void(uint32_t)>& work);

}  // namespace moebius::probe
