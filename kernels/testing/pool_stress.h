// Many short runs of a pool that check themselves: what the tests and the sanitizers put the pool through.
#pragma once

#include <chrono>
#include <cstdint>

namespace moebius::pool {

// Filled by the caller.
struct StressOptions {
  uint32_t threads = 2;
  uint64_t runs = 1000;
  std::chrono::nanoseconds spin{0};
  uint64_t throw_every = 0;  // a task of every n-th run throws; 0: never
  uint64_t pause_every = 0;  // the caller sleeps 200 us after every n-th run, so that the workers do too; 0: never
};

// Filled by stress().
struct StressResult {
  uint64_t tasks = 0;       // done, of all runs
  uint64_t exceptions = 0;  // that reached the caller
  double seconds = 0;
};

// Runs of three phases with 0 to 7 tasks each, the second of a number computed from the first's results, the third
// checking what the second wrote. Throws std::logic_error naming the run when a task was lost, done twice, begun
// before the phase before was over, or after an exception, or when a worker's next task was not the one announced.
StressResult stress(const StressOptions& options);

}  // namespace moebius::pool
