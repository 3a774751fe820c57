// The reference unpacker: what a panel's bytes mean, in scalar code that follows panel_layout.h literally.
#pragma once

#include <cstddef>

#include "kernels/format/panel_layout.h"

namespace moebius {

// weights[16][k]: (value * group scale + minimum) * column scale, rounded to float32 after each operation. bias[16]
// (zero without one), or null.
void unpack_panel(const PanelLayout& layout, const std::byte* panel, float* weights, float* bias);

}  // namespace moebius
