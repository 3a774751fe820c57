#include "kernels/mailbox/wait_policy.h"

#include "kernels/topology/topology.h"

namespace moebius::mailbox {

SpinBudget spin_budget(uint32_t participants, uint32_t cores) {
  if (cores == 0) cores = topology::Topology::detect().recommended_threads(-1);
  if (cores >= participants) return {500'000, 1'000'000};
  return {4'000, 4'000};
}

DeviceWait device_wait(uint32_t server_threads, uint32_t cores) {
  if (cores == 0) cores = topology::Topology::detect().recommended_threads(-1);
  // The client computes elsewhere: only servers need cores. 250 ms is longer than a decode step of any model.
  if (cores >= server_threads) return {250'000'000, 1'000'000, 5'000'000'000, 3'000'000};
  return {4'000, 100'000, 1'000'000'000, 0};
}

}  // namespace moebius::mailbox
