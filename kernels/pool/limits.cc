#include "kernels/pool/limits.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <thread>

#include "kernels/topology/files.h"

namespace moebius::pool {
namespace {

uint32_t usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return std::max(1u, std::thread::hardware_concurrency());
  return static_cast<uint32_t>(std::max(1, CPU_COUNT(&set)));
}

std::optional<double> cpu_quota() { return topology::read_cgroup_limits("/proc", "/sys/fs/cgroup").cpu_quota; }

}  // namespace

uint32_t default_threads(const std::vector<int>& cpus) {
  const uint32_t threads = cpus.empty() ? usable_cpus() : static_cast<uint32_t>(cpus.size());
  const double quota = std::floor(cpu_quota().value_or(threads));
  return quota < threads ? std::max(1u, static_cast<uint32_t>(quota)) : threads;
}

std::chrono::nanoseconds default_spin(uint32_t threads) {
  if (cpu_quota().value_or(threads) < threads) return std::chrono::nanoseconds(0);
  return std::chrono::microseconds(threads < usable_cpus() ? 100 : 50);
}

}  // namespace moebius::pool
