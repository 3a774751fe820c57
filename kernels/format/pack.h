// Exact packing: a checkpoint's codes and scales rearranged into panels, no value rounded; and what panels mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/format/panel_layout.h"
#include "kernels/format/source_matrix.h"

namespace moebius {

// Why `source` can not be packed as `format` without rounding or loss; empty when it can. Exact are: equal
// codes; bfloat16 and float16 elements as float32; equal group sizes with scales of the same type (any type as
// float32); a symmetric source where the format has zeros. What a source lacks and the format has becomes 1
// (column scale), 8 (zero points).
std::string unsupported_reason(const SourceMatrix& source, const WeightFormat& format);
bool packs_exactly(const SourceMatrix& source, const WeightFormat& format);

// Packs columns 16 * panel ... 16 * panel + 15 of the packed matrix (rows of `source`, those beyond its last are
// padding) into target[layout.panel_bytes]; every byte is written. Throws std::invalid_argument when the source
// is not consistent, does not fit the layout, or would be rounded.
void pack_panel(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target);

// Panels first ... first + count - 1, each target_stride bytes after the one before. Faster than one at a time
// where neighbouring panels share cache lines of the source.
struct PanelRange {
  uint32_t first;
  uint32_t count;
  size_t target_stride;
};
void pack_panels(const SourceMatrix& source, const PanelLayout& layout, const PanelRange& panels, std::byte* target);

// The same bytes, element by element through source_access.h: what pack_panel is tested against.
void pack_panel_reference(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target);

// --- Checks shared by the packer, the reference and the dequantiser. They throw std::invalid_argument.

// The source describes a matrix at all.
void check_source(const SourceMatrix& source);

// It can be packed into this panel, exactly.
void check_packing(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel);

// --- The reference unpacker: what a panel's bytes mean, in scalar code that follows panel_layout.h literally.

// weights[16][k]: (value * group scale + minimum) * column scale, rounded to float32 after each operation. bias[16]
// (zero without one), or null.
void unpack_panel(const PanelLayout& layout, const std::byte* panel, float* weights, float* bias);

// The same of one column: weights[k].
void unpack_column(const PanelLayout& layout, const std::byte* panel, uint32_t column, float* weights);

}  // namespace moebius
