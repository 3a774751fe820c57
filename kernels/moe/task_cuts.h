// How the work of a phase is cut into tasks: large ones first, smaller ones towards the end, so that scheduling
// costs little, weights are read in long runs, and all threads finish within one small task of each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moebius {

// What one unit of a phase's work means to the task that takes it.
struct TaskUnit {
  size_t bytes;         // of weights that it adds to a contiguous run
  size_t result_bytes;  // that it adds to the result of a product
  double cost;          // share of the phase's cost
};

class TaskCutter {
 public:
  // total_cost: of all units, in any measure. Tasks have at least about least_bytes of contiguous weights, but at
  // the end of a sequence, and at most about 256 KiB of weights and 512 KiB of results.
  TaskCutter(double total_cost, size_t least_bytes, uint32_t num_threads)
      : remaining_(total_cost), least_bytes_(least_bytes), num_threads_(num_threads) {}

  // How many of the `left` > 0 units of a sequence the next task takes, a multiple of `step` where possible.
  uint32_t next(uint32_t left, const TaskUnit& unit, uint32_t step);

 private:
  double remaining_;
  size_t least_bytes_;
  uint32_t num_threads_;
};

// Rows of one product call: few enough that they and their results stay in the second-level cache while the
// task's panels pass, in equal parts.
uint32_t rows_per_call(uint32_t rows, size_t row_bytes);

}  // namespace moebius
