// How the work of a phase is cut into tasks: large ones first, smaller ones towards the end, so that scheduling
// costs little, weights are read in long runs, and all threads finish within one small task of each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moebius {

// One unit of a sequence that tasks are cut from, and what tasks of such units should be.
struct TaskUnit {
  double cost;          // share of the phase's cost
  size_t bytes;         // of weights that it adds to a contiguous run
  size_t result_bytes;  // that it adds to the result of a product
  size_t least_bytes;   // of weights in a task, but at the end of a sequence
  size_t most_bytes;
  uint32_t step;        // tasks have a multiple of it where possible
};

// Weights of the largest task. With many rows each task also reads those: it had better have as many weights as
// there are rows, or rows are read more often than weights.
size_t most_task_bytes(size_t all_row_bytes);

class TaskCutter {
 public:
  // total_cost: of all units, in any measure.
  TaskCutter(double total_cost, uint32_t num_threads) : remaining_(total_cost), num_threads_(num_threads) {}

  // How many of the `left` > 0 units of a sequence the next task takes; its results stay below 512 KiB.
  uint32_t next(uint32_t left, const TaskUnit& unit);

 private:
  double remaining_;
  uint32_t num_threads_;
};

// Rows of one product call: few enough that they and their results stay in the second-level cache while the
// task's panels pass, in equal parts.
uint32_t rows_per_call(uint32_t rows, size_t row_bytes);

}  // namespace moebius
