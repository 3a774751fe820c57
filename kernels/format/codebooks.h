// What the codes of GGUF's IQ types mean: places in tables of whole numbers, times a power of two. Data only: any file
// may read it, whatever instruction set it is built for.
//
// Rows of the grids of IQ1 are eight such numbers each. A panel has a number's place, not the row's: it takes more bits
// than the file, but every kernel decodes it as it does others.
#pragma once

#include <cstdint>

#include "kernels/format/weight_format.h"

namespace moebius {

struct Codebook {
  int8_t values[16];  // of codes of 3 bits twice
  float unit;
};

// Tables and grids of ggml-common.h of https://github.com/ggml-org/ggml.
constexpr Codebook kIq4Codebook{{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, 1.0f};
// -1, 0, 1 less an eighth, then more an eighth; 3 and 7 are not used.
constexpr Codebook kIq1Codebook{{-9, -1, 7, 0, -7, 1, 9, 0, -9, -1, 7, 0, -7, 1, 9, 0}, 0.125f};

// Of a code from kIq4 on: kCodebooks[code - kIq4]; null of codes of grids (grids.h).
constexpr const Codebook* kCodebooks[] = {&kIq4Codebook, nullptr, nullptr, nullptr, &kIq1Codebook};

}  // namespace moebius
