// Runs of a source row's elements -> float32, before any scale.
#pragma once

#include <cstdint>

#include "kernels/format/source_matrix.h"

namespace moebius {

// target[i] = the value of element (row, begin + i), i < count. int4: the code 0..15, no zero point subtracted.
// begin is even.
void decode_codes(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target);

}  // namespace moebius
