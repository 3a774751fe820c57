// The weights that a checkpoint means, in float32: the reference every packed and requantised form is compared with.
//   plain            element * scales
//   compressed-tensors int4, AWQ, GPTQ   (code - zero) * scale; see source_access.h for their nibble orders
//   with mins    code * scale + minimum (GGUF's Q4_1, Q4_K and the like)
//   fp8 blocks       element * weight_scale_inv[row / 128][column / 128] (DeepSeek-V3)
//   MXFP4            e2m1 * 2^(scale - 127) (OCP Microscaling Formats 1.0)
//   NVFP4            e2m1 * e4m3 scale * global scale (ModelOpt; compressed-tensors stores its reciprocal)
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/source_matrix.h"

namespace moebius {

// target[source.cols] = (value * group scale + minimum) * (column_scale * tensor_scale), in float32, rounded after
// each operation. Throws std::invalid_argument for an inconsistent source or a row beyond its last.
void dequantise_row(const SourceMatrix& source, uint32_t row, float* target);

// Rows first ... first + count - 1, `stride` floats apart in target. Several times faster than one at a time
// where neighbouring rows share cache lines (AWQ, GPTQ, transposed matrices).
void dequantise_rows(const SourceMatrix& source, uint32_t first, uint32_t count, float* target, size_t stride);

// --- Runs of a source row's elements -> float32, before any scale.

// target[i] = the value of element (row, begin + i), i < count. int4: the code 0..15, no zero point subtracted.
// begin is even.
void decode_codes(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target);

}  // namespace moebius
