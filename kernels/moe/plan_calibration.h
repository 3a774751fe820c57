// Measures the kernels of a plan and keeps the fastest for each range of row counts.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/moe/kernel_plan.h"

namespace moebius {

class ThreadPool;

// Measures every matrix of one layout in which there is a choice, on all threads of the pool, over the packed
// `experts` (not empty) one after the other: with enough of them weights come from memory as they do in service.
// Takes about 0.3 s at most; ranges that no time was left for keep the last measured choice.
void calibrate_plan(KernelPlan& plan, size_t layout_index, const ExpertLayout& layout,
                    const std::vector<const std::byte*>& experts, ThreadPool& pool);

}  // namespace moebius
