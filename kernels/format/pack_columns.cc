#include "kernels/format/pack_columns.h"

#include <algorithm>
#include <cstring>

#include "kernels/format/source_access.h"

namespace moebius {
namespace {

struct Columns {
  uint32_t begin;  // source row of the panel's column 0
  uint32_t count;  // columns that exist
};

// As it is, or widened to float32.
void store_scale(const SourceMatrix& source, ScaleType type, uint32_t row, uint32_t group, std::byte* target) {
  const ptrdiff_t index = source_scale_index(source, row, group);
  if (source.scale_type == type) {
    const size_t bytes = scale_bytes(type);
    std::memcpy(target, static_cast<const std::byte*>(source.scales) + index * static_cast<ptrdiff_t>(bytes), bytes);
    return;
  }
  const float scale = load_scale(source.scale_type, source.scales, index);
  std::memcpy(target, &scale, sizeof(scale));
}

void pack_group_scales(const SourceMatrix& source, const PanelLayout& layout, Columns columns, std::byte* target) {
  const ScaleType type = layout.format.scale;
  const size_t bytes = scale_bytes(type);
  const uint32_t width = layout.format.panel_scale ? 1 : kPanelColumns;
  for (uint32_t group = 0; group < layout.groups; ++group) {
    for (uint32_t column = 0; column < std::min(width, columns.count); ++column) {
      store_scale(source, type, columns.begin + column, group, target + (size_t{group} * width + column) * bytes);
    }
  }
}

void pack_zeros(const SourceMatrix& source, const PanelLayout& layout, Columns columns, std::byte* target) {
  for (uint32_t group = 0; group < layout.groups; ++group) {
    for (uint32_t column = 0; column < kPanelColumns; ++column) {
      const uint32_t zero = column < columns.count ? source_zero(source, columns.begin + column, group) : 8;
      target[size_t{group} * kPanelColumns + column] = static_cast<std::byte>(zero);
    }
  }
}

}  // namespace

uint32_t padding_code(Code code) { return code == Code::kInt4 ? 8 : 0; }

void pack_panel_scales(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target) {
  const uint32_t begin = panel * kPanelColumns;
  const Columns columns{begin, std::min(kPanelColumns, source.rows - begin)};
  std::memset(target + layout.scales_offset, 0, layout.panel_bytes - layout.scales_offset);
  if (layout.groups != 0) pack_group_scales(source, layout, columns, target + layout.scales_offset);
  if (layout.format.zeros) pack_zeros(source, layout, columns, target + layout.zeros_offset);
  for (uint32_t column = 0; column < columns.count; ++column) {
    const size_t offset = column * sizeof(float);
    if (layout.format.column_scale) {
      const float scale = source_column_scale(source, begin + column);
      std::memcpy(target + layout.column_scale_offset + offset, &scale, sizeof(scale));
    }
    if (source.bias != nullptr) std::memcpy(target + layout.bias_offset + offset, source.bias + begin + column, 4);
  }
}

}  // namespace moebius
