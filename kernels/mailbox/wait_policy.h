// How long to spin before sleeping, from the cores this process may really use.
#pragma once

#include <cstdint>

namespace moebius::mailbox {

// Nanoseconds of spinning before a futex wait.
struct SpinBudget {
  uint64_t client_ns;
  uint64_t server_ns;
};

// With a core for each participant (the client and every server thread) spinning is free,
// so it bridges the gap between two layers. With fewer, each spin steals from the thread waited for.
// `participants` counts busy threads of all processes; `cores` 0 means: the ones this process may use.
SpinBudget spin_budget(uint32_t participants, uint32_t cores = 0);

// How an idle server waits for a device-driven client, which can not wake a sleeper. Between two layers of a
// step it must not sleep, and a step may compute for long before its first expert layer: it spins for spin_ns
// after its last work, then looks every nap_ns until idle_ns have passed, then only at its heartbeat. The
// client's host rings before each step, which restarts this sequence. The backend's other threads spin for
// pause_ns, 0: as long as they like: a device's attention of one layer, the last layer's logits and the next step's
// first layers of decode lie between two of its calls, and waking all threads costs as much as a layer of experts.
struct DeviceWait {
  uint64_t spin_ns;
  uint64_t nap_ns;
  uint64_t idle_ns;
  uint64_t pause_ns;
};

// Spinning needs a CPU for every thread of this server, and of all `num_servers` where this process may use every CPU
// of the machine: then they have not been divided. `cpus` 0: detected, with the cgroup's quota.
DeviceWait device_wait(uint32_t threads, uint32_t num_servers, uint32_t cpus = 0);

}  // namespace moebius::mailbox
