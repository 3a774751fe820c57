#include "kernels/probe/thread_team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "kernels/topology/memory.h"

namespace moebius::probe {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSpins = 20000;  // before a waiting thread offers its cpu to one that has none

// Spins, because the wake-up from a futex would be part of what is measured.
void arrive_and_wait(std::atomic<uint32_t>& arrived, uint32_t expected) {
  arrived.fetch_add(1);
  for (int spins = 0; arrived.load(std::memory_order_acquire) < expected; ++spins) {
    if (spins > kSpins) {
      std::this_thread::yield();
    } else {
      __builtin_ia32_pause();
    }
  }
}

void check_cpus(const std::vector<int>& cpus) {
  if (cpus.empty()) throw std::invalid_argument("cpus is empty; at least one is needed");
  for (int cpu : cpus) {
    if (cpu < 0) throw std::invalid_argument("cpu " + std::to_string(cpu) + " is negative");
  }
}

}  // namespace

double run_together(const std::vector<int>& cpus, const std::function<void(uint32_t)>& work) {
  check_cpus(cpus);
  const auto count = static_cast<uint32_t>(cpus.size());
  std::vector<Clock::time_point> begins(count);
  std::vector<Clock::time_point> ends(count);
  std::atomic<uint32_t> arrived{0};
  std::atomic<int> refused{-1};
  std::vector<std::jthread> threads;
  for (uint32_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      if (!topology::pin_thread({cpus[i]}).applied) refused = cpus[i];
      arrive_and_wait(arrived, count);
      if (refused >= 0) return;
      begins[i] = Clock::now();
      work(i);
      ends[i] = Clock::now();
    });
  }
  threads.clear();  // joins
  if (refused >= 0) {
    throw std::invalid_argument("cpu " + std::to_string(refused.load()) + " can not be used by this process");
  }
  const auto first = *std::min_element(begins.begin(), begins.end());
  const auto last = *std::max_element(ends.begin(), ends.end());
  return std::chrono::duration<double>(last - first).count();
}

}  // namespace moebius::probe
