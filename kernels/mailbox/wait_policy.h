// How long to spin before sleeping, from the cores this process may really use.
#pragma once

#include <cstdint>

namespace moebius::mailbox {

// Nanoseconds of spinning before a futex wait.
struct SpinBudget {
  uint64_t client_ns;
  uint64_t server_ns;
};

// With a core for each participant (the client and every server thread) spinning costs nobody anything,
// so it bridges the gap between two layers. With fewer, each spin steals from the thread waited for.
// `participants` counts busy threads of all processes; `cores` 0 means: the ones this process may use.
SpinBudget spin_budget(uint32_t participants, uint32_t cores = 0);

}  // namespace moebius::mailbox
