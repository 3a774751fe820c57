// Clocks, spinning and futexes shared between processes.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace moebius::mailbox {

inline uint64_t clock_ns(clockid_t clock = CLOCK_MONOTONIC) {
  timespec now{};
  clock_gettime(clock, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000u + uint64_t(now.tv_nsec);
}

// Not FUTEX_PRIVATE: waiter and waker are different processes. Spurious returns are allowed.
inline void futex_wait(uint32_t* word, uint32_t expected, uint64_t timeout_ns) {
  timespec timeout{time_t(timeout_ns / 1'000'000'000u), long(timeout_ns % 1'000'000'000u)};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

inline void futex_wake_all(uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The words are plain integers in the layout; every access that another process sees goes through here.
template <typename T>
inline std::atomic_ref<T> shared(T& word) {
  return std::atomic_ref<T>(word);
}

// Low half of an epoch, which is what a 32-bit futex can watch (x86 is little-endian).
inline uint32_t* low_word(uint64_t& epoch) { return reinterpret_cast<uint32_t*>(&epoch); }

// Spins until `arrived` holds or the budget is spent; returns whether it arrived. Yields at times: the
// scheduler often wakes a sleeper on its waker's core, where a pure spin would keep it from running.
template <typename Condition>
inline bool spin_for(uint64_t budget_ns, Condition arrived) {
  constexpr uint64_t kYieldNs = 4'000;
  if (arrived()) return true;
  const uint64_t start = clock_ns();
  uint64_t next_yield = start + kYieldNs;
  for (uint64_t now = start; now - start < budget_ns; now = clock_ns()) {
    for (int i = 0; i < 16; ++i) {
      if (arrived()) return true;
      __builtin_ia32_pause();
    }
    if (now < next_yield) continue;
    sched_yield();
    next_yield = now + kYieldNs;
  }
  return arrived();
}

}  // namespace moebius::mailbox
