// Random matrices laid out like a checkpoint's, in buffers of exactly the size they need.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/format/source_matrix.h"
#include "tests/kernels/fuzz/random.h"

namespace moebius::fuzz {

// Filled by draw_source; `matrix` points into the buffers, which move with it.
struct FuzzSource {
  SourceMatrix matrix;
  std::vector<std::vector<std::byte>> buffers;
};

// A matrix [rows, cols] for `format`: its own codes and scales, in any layout that checkpoints hold them in, or now
// and then float32, which has to be rounded to it (where requantise.h can). Values times scales have variance near
// 1 / cols.
FuzzSource draw_source(const WeightFormat& format, uint32_t rows, uint32_t cols, bool has_bias, Random& random);

}  // namespace moebius::fuzz
