// What the codes of GGUF's IQ types mean: places in tables of whole numbers, times a power of two. Data only: any file
// may read it, whatever instruction set it is built for.
#pragma once

#include <cstdint>

#include "kernels/format/weight_format.h"

namespace moebius {

struct Codebook {
  int8_t values[16];
  float unit;
};

// Tables and grids of ggml-common.h of https://github.com/ggml-org/ggml.
constexpr Codebook kIq4Codebook{{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, 1.0f};

// Of a code from kIq4 on that is no grid's (grids.h): kCodebooks[code - kIq4].
constexpr const Codebook* kCodebooks[] = {&kIq4Codebook};

}  // namespace moebius
