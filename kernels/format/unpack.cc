#include "kernels/format/unpack.h"

#include "kernels/format/panel_values.h"

namespace moebius {
void unpack_panel(const PanelLayout& layout, const std::byte* panel, float* weights, float* bias) {
  const WeightFormat& format = layout.format;
  for (uint32_t column = 0; column < kPanelColumns; ++column) {
    const std::byte* column_scales = panel + layout.column_scale_offset;
    const float column_scale = format.column_scale ? load_element<float>(column_scales, column) : 1.0f;
    for (uint32_t k = 0; k < layout.k; ++k) {
      const uint32_t group = layout.groups == 0 ? 0 : k / format.group_size;
      const uint32_t entry = group * kPanelColumns + column;
      const uint32_t zero = panel_zero(layout, panel, entry);
      const float group_scale =
          load_scale(format.scale, panel + layout.scales_offset, format.panel_scale ? group : entry);
      const float decoded = decode_value(format.code, panel_code(layout, panel, column, k), zero);
      float weight = decoded * group_scale;
      if (format.minimums) weight += load_scale(format.scale, panel + layout.minimums_offset, entry);
      weights[size_t{column} * layout.k + k] = weight * column_scale;
    }
    if (bias == nullptr) continue;
    bias[column] = layout.has_bias ? load_element<float>(panel + layout.bias_offset, column) : 0.0f;
  }
}

}  // namespace moebius
