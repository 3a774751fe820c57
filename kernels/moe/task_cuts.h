// How the work of a phase is cut into tasks: large ones first, smaller ones towards the end, so that scheduling
// costs little, weights are read in long runs, and all threads finish within one small task of each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moebius {

class TaskCutter {
 public:
  // total_cost: of all units, in any measure. Tasks have at least about least_bytes of contiguous weights, but at
  // the end of a sequence, and at most about 256 KiB.
  TaskCutter(double total_cost, size_t least_bytes, uint32_t num_threads)
      : remaining_(total_cost), least_bytes_(least_bytes), num_threads_(num_threads) {}

  // How many of the `left` > 0 units of a sequence the next task takes. unit_bytes: weights that a unit adds to
  // the contiguous run; unit_cost: share of total_cost; step: units come in multiples of it where possible.
  uint32_t next(uint32_t left, size_t unit_bytes, double unit_cost, uint32_t step);

 private:
  double remaining_;
  size_t least_bytes_;
  uint32_t num_threads_;
};

// Rows of one product call: few enough that they and their results stay in the second-level cache while the
// task's panels pass, in equal parts.
uint32_t rows_per_call(uint32_t rows, size_t row_bytes);

}  // namespace moebius
