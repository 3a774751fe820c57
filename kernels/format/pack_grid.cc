// Rows of a grid: words of a checkpoint's blocks, a line for all columns of a panel.
#include <cstring>

#include "kernels/format/pack_lines.h"
#include "kernels/format/source_access.h"

namespace moebius {

void pack_lines_grid(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines, std::byte* target) {
  const uint32_t words = code_bits(layout.format.code), step = grid_source_words(layout.format.code);
  const auto* const data = static_cast<const uint32_t*>(source.data);
  auto* to = reinterpret_cast<uint32_t*>(target);
  for (uint32_t line = lines.begin; line < lines.end; line += words, to += size_t{words} * kPanelColumns) {
    const uint32_t chunk = line / words;
    for (uint32_t column = 0; column < kPanelColumns; ++column) {
      const uint32_t row = lines.panel * kPanelColumns + column;
      const bool held = row < source.rows && chunk * 32 < source.cols;
      const uint32_t* const from = data + static_cast<ptrdiff_t>(row) * source.row_stride + size_t{chunk} * step;
      for (uint32_t word = 0; word < words; ++word) to[word * kPanelColumns + column] = held ? from[word] : 0;
    }
  }
}

void pack_grid_signs(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target) {
  const uint32_t words = code_bits(layout.format.code), step = grid_source_words(layout.format.code);
  const uint32_t bytes = sign_bytes(layout.format.code);
  const auto* const data = static_cast<const uint32_t*>(source.data);
  for (uint32_t column = 0; column < kPanelColumns; ++column) {
    const uint32_t row = panel * kPanelColumns + column;
    if (row >= source.rows) return;
    const uint32_t* const from = data + static_cast<ptrdiff_t>(row) * source.row_stride + words;
    for (uint32_t chunk = 0; chunk * 32 < source.cols; ++chunk) {
      std::memcpy(target + (size_t{chunk} * kPanelColumns + column) * bytes, from + size_t{chunk} * step, bytes);
      if (layout.format.code != Code::kTq1) continue;
      std::byte& both = target[layout.k_padded + size_t{chunk / 2} * kPanelColumns + column];
      both |= static_cast<std::byte>((from[size_t{chunk} * step] >> 16 & 15) << (chunk % 2 * 4));
    }
  }
}

}  // namespace moebius
