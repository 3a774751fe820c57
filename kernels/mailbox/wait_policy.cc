#include "kernels/mailbox/wait_policy.h"

#include "kernels/topology/topology.h"

namespace moebius::mailbox {

SpinBudget spin_budget(uint32_t participants, uint32_t cores) {
  if (cores == 0) cores = topology::Topology::detect().recommended_threads(-1);
  if (cores >= participants) return {500'000, 1'000'000};
  return {4'000, 4'000};
}

}  // namespace moebius::mailbox
