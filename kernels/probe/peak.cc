#include "kernels/probe/peak.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "kernels/probe/thread_team.h"

namespace moebius::probe {
namespace {

constexpr int kRounds = 5;
constexpr uint64_t kFirstIterations = 1000;

}  // namespace

double measure_peak(const PeakKernel& kernel, const std::vector<int>& cpus, double seconds) {
  if (!(seconds >= 0.001 && seconds <= 60)) {
    throw std::invalid_argument("seconds is " + std::to_string(seconds) + "; allowed: 0.001 to 60");
  }
  std::atomic<uint64_t> sum{0};
  const auto run = [&](uint64_t iterations) {
    return run_together(cpus, [&](uint32_t) { sum += kernel.run(iterations); });
  };
  // Long enough that starting does not count, found by doubling: the first rounds also raise the clock.
  const double round_seconds = seconds / kRounds;
  uint64_t iterations = kFirstIterations;
  while (run(iterations) < round_seconds / 2) iterations *= 2;
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    best = std::max(best, static_cast<double>(iterations) / run(iterations));
  }
  return best * static_cast<double>(kernel.operations) * static_cast<double>(cpus.size());
}

}  // namespace moebius::probe
