// Random packed weights, written as fast as memory takes them: benchmarks fill tens of gigabytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/panel_layout.h"

namespace moebius {

// Writes a valid expert of layout.expert_bytes, the same for the same seed. Weights are about uniform with
// variance near 1 / k, so that normal rows give results of order 1, finite in every format; biases lie in
// [-0.5, 0.5). Columns that only pad a panel are zero.
void fill_random_expert(const ExpertLayout& layout, uint64_t seed, std::byte* target);

}  // namespace moebius
