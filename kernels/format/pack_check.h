// Checks shared by the packer, the reference and the dequantiser. They throw std::invalid_argument.
#pragma once

#include "kernels/format/panel_layout.h"
#include "kernels/format/source_matrix.h"

namespace moebius {

// The source describes a matrix at all.
void check_source(const SourceMatrix& source);

// It can be packed into this panel, exactly.
void check_packing(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel);

}  // namespace moebius
