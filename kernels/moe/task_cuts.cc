#include "kernels/moe/task_cuts.h"

#include <algorithm>

namespace moebius {
namespace {

constexpr size_t kMostBytes = size_t{256} << 10;
constexpr size_t kWeightsPerRows = 8;
constexpr size_t kMostResultBytes = size_t{1} << 20;
constexpr uint32_t kFineTasks = 4;  // this many of the smallest tasks per thread balance the load
constexpr double kShare = 1.5;  // of what is left for each thread, a task takes 1 / kShare

constexpr size_t kRowsBytes = size_t{1} << 20;
constexpr uint32_t kFewestRows = 128;
constexpr uint32_t kMostRows = 512;
constexpr uint32_t kRowStep = 32;

}  // namespace

size_t most_task_bytes(size_t all_row_bytes) { return std::max(kMostBytes, kWeightsPerRows * all_row_bytes); }

TaskCutter::Sizes TaskCutter::sizes_of(const TaskUnit& unit) const {
  const size_t fit = std::max<size_t>(kMostResultBytes / unit.result_bytes, 1);
  const size_t least = std::min((unit.least_bytes + unit.bytes - 1) / unit.bytes, fit);
  const size_t most = std::max(std::min(unit.most_bytes / unit.bytes, fit), least);
  const auto in_steps = [&](size_t units) {
    return static_cast<uint32_t>(std::max<size_t>(units / unit.step, 1)) * unit.step;
  };
  const double enough = num_threads_ == 1 ? 0.0 : static_cast<double>(most) * kShare * num_threads_ * unit.cost;
  return {in_steps(least), in_steps(most), enough};
}

uint32_t TaskCutter::even_tasks(uint32_t units, const TaskUnit& unit) const {
  const Sizes sizes = sizes_of(unit);
  if (sizes.least == 1 || kFineTasks * sizes.least * num_threads_ <= units) return 0;
  const uint32_t rounds = std::max(units / (sizes.least * num_threads_), 1u);
  // More where results of the largest would be too many.
  return std::min(units, std::max(rounds * num_threads_, (units + sizes.most - 1) / sizes.most));
}

uint32_t TaskCutter::next(uint32_t left, const TaskUnit& unit, const Sizes& sizes) {
  uint32_t units = sizes.most;
  if (remaining_ < sizes.enough) {
    const auto share = static_cast<uint32_t>(std::max(remaining_, 0.0) / (kShare * num_threads_ * unit.cost));
    units = std::clamp(share / unit.step * unit.step, sizes.least, sizes.most);
  }
  units = std::min(units, left);
  remaining_ -= units * unit.cost;
  return units;
}

uint32_t rows_per_call(uint32_t rows, size_t row_bytes) {
  const auto fit = static_cast<uint32_t>(std::clamp<size_t>(kRowsBytes / row_bytes, kFewestRows, kMostRows));
  if (rows <= fit) return rows;
  const uint32_t calls = (rows + fit - 1) / fit;
  return ((rows + calls - 1) / calls + kRowStep - 1) / kRowStep * kRowStep;
}

}  // namespace moebius
