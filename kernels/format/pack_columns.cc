#include "kernels/format/pack_lines.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/format/source_access.h"
#include "kernels/format/transpose_words.h"

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
  const float scale = load_source_scale(source.scale_type, source.scales, index);
  std::memcpy(target, &scale, sizeof(scale));
}

void pack_any_scales(const SourceMatrix& source, const PanelLayout& layout, Columns columns, std::byte* target) {
  const ScaleType type = layout.format.scale;
  const size_t bytes = scale_bytes(type);
  const uint32_t width = layout.format.panel_scale ? 1 : kPanelColumns;
  for (uint32_t group = 0; group < layout.groups; ++group) {
    for (uint32_t column = 0; column < std::min(width, columns.count); ++column) {
      store_scale(source, type, columns.begin + column, group, target + (size_t{group} * width + column) * bytes);
    }
  }
}

// Scales whose groups are neighbours, one row for each column: transposed as words of 4 / sizeof(T) groups.
template <class T>
void transpose_scales(const SourceMatrix& source, const PanelLayout& layout, Columns columns, std::byte* target) {
  constexpr uint32_t kPerWord = 4 / sizeof(T);
  constexpr uint32_t kTileGroups = 16 * kPerWord;
  const auto* scales = static_cast<const T*>(source.scales);
  for (uint32_t begin = 0; begin < layout.groups; begin += kTileGroups) {
    const uint32_t count = std::min(kTileGroups, layout.groups - begin);
    alignas(64) T staged[kPanelColumns][kTileGroups] = {};
    alignas(64) uint32_t lines[16][kPanelColumns];
    const std::byte* rows[kPanelColumns];
    for (uint32_t column = 0; column < kPanelColumns; ++column) {
      rows[column] = reinterpret_cast<const std::byte*>(staged[column]);
      if (column >= columns.count) continue;
      const T* row = scales + source_scale_index(source, columns.begin + column, begin);
      if (count == kTileGroups) rows[column] = reinterpret_cast<const std::byte*>(row);
      else std::memcpy(staged[column], row, count * sizeof(T));
    }
    transpose_words(rows, 16, false, reinterpret_cast<std::byte*>(lines));
    for (uint32_t group = 0; group < count; ++group) {
      alignas(16) T values[kPanelColumns];
      const uint32_t shift = group % kPerWord * 8 * sizeof(T);
      for (uint32_t column = 0; column < kPanelColumns; ++column) {
        values[column] = static_cast<T>(lines[group / kPerWord][column] >> shift);
      }
      std::memcpy(target + size_t{begin + group} * sizeof(values), values, sizeof(values));
    }
  }
}

// Scales whose rows are neighbours.
void copy_scales(const SourceMatrix& source, const PanelLayout& layout, Columns columns, std::byte* target) {
  const size_t bytes = scale_bytes(layout.format.scale);
  const auto* scales = static_cast<const std::byte*>(source.scales);
  for (uint32_t group = 0; group < layout.groups; ++group) {
    const ptrdiff_t index = source_scale_index(source, columns.begin, group);
    std::memcpy(target + group * kPanelColumns * bytes, scales + index * static_cast<ptrdiff_t>(bytes),
                columns.count * bytes);
  }
}

// A whole number of a product, to where zeros were. Throws std::invalid_argument for one of more than its 4 bits.
void put_whole(const PanelLayout& layout, bool of_mins, uint8_t number, std::byte* target) {
  if (layout.joined && number > 15) {
    throw std::invalid_argument("source matrix: a scale's whole number is " + std::to_string(number) +
                                "; allowed for " + weight_format_name(layout.format) + ": 0 to 15");
  }
  *target |= static_cast<std::byte>(layout.joined && of_mins ? number << 4 : number);
}

// A whole number of fewer than 8 bits, to where zeros were: of rows of a grid 2 s + 1 as s. Throws
// std::invalid_argument for another number. `section`: its column's first byte.
void put_field(const PanelLayout& layout, int8_t number, uint32_t group, std::byte* section) {
  const uint32_t low_bits = layout.whole_low_bits, high_bits = layout.whole_high_bits;
  const int count = 1 << (low_bits + high_bits);
  const bool of_grid = is_grid(layout.format.code);
  const int field = of_grid ? number >> 1 : number + count / 2;
  if (field < 0 || field >= count || (of_grid && number % 2 == 0)) {
    const std::string allowed = of_grid ? "1, 3, ..., " + std::to_string(2 * count - 1)
                                        : std::to_string(-count / 2) + " to " + std::to_string(count / 2 - 1);
    throw std::invalid_argument("source matrix: a scale's whole number is " + std::to_string(number) +
                                "; allowed for " + weight_format_name(layout.format) + ": " + allowed);
  }
  const auto put = [&](size_t offset, uint32_t bits, int value) {
    const uint32_t bit = group * bits;
    section[offset + size_t{bit / 8} * kPanelColumns] |= static_cast<std::byte>(value << bit % 8);
  };
  put(layout.whole_offset, low_bits, field & ((1 << low_bits) - 1));
  if (high_bits != 0) put(layout.whole_high_offset, high_bits, field >> low_bits);
}

// Factors of `factor_groups` groups, to `target`; the whole numbers of each after them, or after those of `scales`.
void pack_products(const SourceMatrix& source, const PanelLayout& layout, Columns columns, std::byte* target,
                   std::byte* scales) {
  const bool of_mins = target != scales;
  for (uint32_t group = 0; group < layout.groups; ++group) {
    std::byte* const factors = target + size_t{group / layout.factor_groups} * kPanelColumns * sizeof(uint16_t);
    std::byte* const whole =
        (layout.joined ? scales : target) + layout.whole_offset + size_t{group} * kPanelColumns;
    for (uint32_t column = 0; column < columns.count; ++column) {
      const ptrdiff_t index = source_scale_index(source, columns.begin + column, group);
      const auto word = load_element<uint32_t>(source.scales, index);
      const auto factor = static_cast<uint16_t>(word);
      if (group % layout.factor_groups != 0 && load_element<uint16_t>(factors, column) != factor) {
        throw std::invalid_argument("source matrix: groups " + std::to_string(group - 1) + " and " +
                                    std::to_string(group) + " of row " + std::to_string(columns.begin + column) +
                                    " have two factors; it has to be cut at multiples of " +
                                    std::to_string(layout.factor_groups * layout.format.group_size) + " columns");
      }
      std::memcpy(factors + column * sizeof factor, &factor, sizeof factor);
      const auto number = static_cast<uint8_t>(word >> 16);
      if (layout.whole_low_bits != 0) {
        put_field(layout, static_cast<int8_t>(number), group, target + column);
      } else if (!is_grid(layout.format.code)) {
        put_whole(layout, of_mins, number, whole + column);
      }
    }
  }
}

// `target`: the section of scales, at `scales`, or of mins.
void pack_group_scales(const SourceMatrix& source, const PanelLayout& layout, Columns columns, std::byte* target,
                       std::byte* scales) {
  if (layout.format.scale == ScaleType::kProducts) return pack_products(source, layout, columns, target, scales);
  if (source.scale_type != layout.format.scale || layout.format.panel_scale || source.scale_rows != 1) {
    return pack_any_scales(source, layout, columns, target);
  }
  if (source.scale_row_stride == 1) return copy_scales(source, layout, columns, target);
  if (source.scale_group_stride != 1) return pack_any_scales(source, layout, columns, target);
  switch (scale_bytes(source.scale_type)) {
    case 1: return transpose_scales<uint8_t>(source, layout, columns, target);
    case 2: return transpose_scales<uint16_t>(source, layout, columns, target);
    default: return transpose_scales<uint32_t>(source, layout, columns, target);
  }
}

void pack_zeros(const SourceMatrix& source, const PanelLayout& layout, Columns columns, std::byte* target) {
  if (source.zeros == nullptr) {
    std::memset(target, 8, size_t{layout.groups} * kPanelColumns);
    return;
  }
  for (uint32_t group = 0; group < layout.groups; ++group) {
    std::byte* const zeros = target + size_t{group} * kPanelColumns;
    for (uint32_t column = 0; column < kPanelColumns; ++column) {
      const uint32_t zero = column < columns.count ? source_zero(source, columns.begin + column, group) : 8;
      zeros[column] = static_cast<std::byte>(zero);
    }
  }
}

}  // namespace

uint32_t padding_code(Code code) { return code == Code::kInt4 ? 8 : 0; }

void pack_panel_scales(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target) {
  const uint32_t begin = panel * kPanelColumns;
  const Columns columns{begin, std::min(kPanelColumns, source.rows - begin)};
  std::memset(target + layout.scales_offset, 0, layout.panel_bytes - layout.scales_offset);
  std::byte* const scales = target + layout.scales_offset;
  if (layout.groups != 0) pack_group_scales(source, layout, columns, scales, scales);
  if (layout.format.mins) {
    SourceMatrix mins = source;
    mins.scales = source.mins;
    pack_group_scales(mins, layout, columns, target + layout.mins_offset, scales);
  }
  if (sign_bytes(layout.format.code) != 0) pack_grid_signs(source, layout, panel, target + layout.signs_offset);
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
