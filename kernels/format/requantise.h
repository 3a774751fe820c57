// Packing a matrix in a format other than its own, with the error that this makes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/panel_layout.h"
#include "kernels/format/source_matrix.h"

namespace moebius {

// Sums over weights in float64; the relative error of a matrix or a layer is
// sqrt(sum of squared_error / sum of squared_reference). Weights that are NaN or infinite make both NaN.
struct PackError {
  double squared_error = 0.0;
  double squared_reference = 0.0;
};

// Whether requantise_panel can make this format: float32, bfloat16, float16, int8 and int4 with column or
// group scales; not the float8 and float4 formats, which only come from checkpoints.
bool can_requantise_to(const WeightFormat& format);

// Writes panel `panel` (columns 16 * panel ... of layout) of `source`, decoded and rounded to layout.format:
//   float32, bfloat16, float16   rounded to nearest even
//   int8                         the symmetric column scale of least squared error among some that clip
//   int4                         per group the scale (and zero point) of least squared error, after its own
//                                rounding to the scale type; symmetric scales may be negative, so that either
//                                sign of a group's largest weight can take code -8
// layout.k is source.cols; columns from source.rows and k from source.cols on become zeros. A group (int8: a
// column) that holds a NaN or an infinity gets a NaN scale: it is never hidden. `target` has
// layout.panel_bytes. Callable from several threads.
// Throws std::invalid_argument when can_requantise_to(layout.format) is false or k differs.
PackError requantise_panel(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel,
                           std::byte* target);

}  // namespace moebius
