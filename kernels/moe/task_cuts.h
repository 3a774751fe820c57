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
  size_t result_bytes;  // that it adds to the result of a GEMM
  size_t least_bytes;   // of weights in a task, but at the end of a sequence
  size_t most_bytes;
  uint32_t step;        // tasks have a multiple of it where possible
};

// Weights of the largest task. With many rows each task also reads, and may copy, those, from the caches of the
// threads that wrote them: it should have several times as many weights.
size_t most_task_bytes(size_t all_row_bytes);

class TaskCutter {
 public:
  // total_cost: of all units, in any measure.
  TaskCutter(double total_cost, uint32_t num_threads) : remaining_(total_cost), num_threads_(num_threads) {}

  // Cuts a sequence of `units` into tasks: take(first unit, number of units), in order. Results of a task stay below
  // 1 MiB.
  template <class Take>
  void cut(uint32_t units, const TaskUnit& unit, Take&& take) {
    const Sizes sizes = sizes_of(unit);
    for (uint32_t first = 0; first < units;) {
      const uint32_t count = next(units - first, unit, sizes);
      take(first, count);
      first += count;
    }
  }

  // The same of a sequence that is all there is to do. Where even the smallest tasks are a good part of a thread's
  // share, the last one would keep all other threads waiting: there tasks are equal, with the same number per thread.
  template <class Take>
  void cut_whole(uint32_t units, const TaskUnit& unit, Take&& take) {
    const uint32_t tasks = even_tasks(units, unit);
    if (tasks == 0) return cut(units, unit, take);
    for (uint32_t task = 0, first = 0; task < tasks; ++task) {
      const uint32_t count = units / tasks + (task < units % tasks ? 1 : 0);
      take(first, count);
      first += count;
    }
  }

 private:
  // Units of the smallest and the largest task, and the remaining cost from which on tasks are that large.
  struct Sizes {
    uint32_t least;
    uint32_t most;
    double enough;
  };

  Sizes sizes_of(const TaskUnit& unit) const;
  uint32_t even_tasks(uint32_t units, const TaskUnit& unit) const;  // 0: small ones even out
  uint32_t next(uint32_t left, const TaskUnit& unit, const Sizes& sizes);

  double remaining_;
  uint32_t num_threads_;
};

// Rows of one GEMM call: few enough that they and their results stay in the second-level cache while the
// task's panels pass, in equal parts.
uint32_t rows_per_call(uint32_t rows, size_t row_bytes);

}  // namespace moebius
