// Packing whose codes stay as they are and whose group scales are rounded.
#pragma once

#include <cstddef>

#include "kernels/format/pack.h"
#include "kernels/format/panel_layout.h"
#include "kernels/format/requantise.h"
#include "kernels/format/source_matrix.h"

namespace moebius {

// Whether nothing keeps `source` from being packed as `format` but float32 scales (and minimums) where the format
// has float16 ones: products of two stored numbers, such as those of GGUF's Q4_K and Q6_K.
bool packs_with_rounded_scales(const SourceMatrix& source, const WeightFormat& format);

// As pack_panels, scales and minimums rounded to nearest even; returns what that changes of the weights. Throws
// std::invalid_argument naming a scale that float16 has no finite number for.
PackError pack_with_rounded_scales(const SourceMatrix& source, const PanelLayout& layout, const PanelRange& panels,
                                   std::byte* target);

}  // namespace moebius
