// The parts of a panel beside its codes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/panel_layout.h"
#include "kernels/format/source_matrix.h"

namespace moebius {

// What padding elements hold: int4 code 8 (zero of a symmetric format), zero bits elsewhere.
uint32_t padding_code(Code code);

// Group scales, zero points, minimums, column scales and bias of a panel. Columns beyond the last row get zero
// scales and minimums, and zero point 8.
void pack_panel_scales(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target);

}  // namespace moebius
