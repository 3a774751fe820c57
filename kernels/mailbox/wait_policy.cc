#include "kernels/mailbox/wait_policy.h"

#include <unistd.h>

#include <algorithm>

#include "kernels/topology/topology.h"

namespace moebius::mailbox {

SpinBudget spin_budget(uint32_t participants, uint32_t cores) {
  if (cores == 0) cores = topology::Topology::detect().recommended_threads(-1);
  if (cores >= participants) return {500'000, 1'000'000};
  return {4'000, 4'000};
}

DeviceWait device_wait(uint32_t threads, uint32_t num_servers, uint32_t cpus) {
  bool divided = false;
  if (cpus == 0) {
    const auto topology = topology::Topology::detect();
    cpus = static_cast<uint32_t>(topology.allowed_cpus.size());
    divided = cpus < static_cast<uint32_t>(sysconf(_SC_NPROCESSORS_ONLN));
    if (topology.cpu_quota) cpus = std::min(cpus, static_cast<uint32_t>(*topology.cpu_quota));
  }
  // The client computes elsewhere: only servers need CPUs. 250 ms is longer than a decode step of any model.
  if (cpus >= threads * (divided ? 1 : num_servers)) return {250'000'000, 1'000'000, 5'000'000'000, 3'000'000};
  return {4'000, 100'000, 1'000'000'000, 0};
}

}  // namespace moebius::mailbox
