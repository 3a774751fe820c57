// Random packed weights, written as fast as memory takes them: benchmarks fill tens of gigabytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/moe/expert_engine.h"

namespace moebius {

// Writes a valid expert of layout.expert_bytes, the same for the same seed. Weights are about uniform with
// variance near 1 / k, so that normal rows give results of order 1, finite in every format; biases lie in
// [-0.5, 0.5). Columns that only pad a panel are zero.
void fill_random_expert(const ExpertLayout& layout, uint64_t seed, std::byte* target);

// All experts of an engine's layer, on all its threads. Throws std::invalid_argument when the layer does not exist or
// an expert of it was loaded before.
void fill_random(ExpertEngine& engine, uint32_t layer, uint64_t seed);

}  // namespace moebius
