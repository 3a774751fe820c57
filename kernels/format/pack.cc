#include "kernels/format/pack.h"

#include <algorithm>

#include "kernels/format/pack_check.h"
#include "kernels/format/pack_columns.h"
#include "kernels/format/pack_lines.h"

namespace moebius {
namespace {

// Where panels side by side share the source's cache lines, this many lines of each are packed in turn: few
// enough for those cache lines to stay close.
constexpr uint32_t kSharedLines = 16;

struct Packer {
  PackLines lines;
  bool shares_cache_lines;
};

Packer packer_of(const SourceMatrix& source, Code code) {
  switch (source.layout) {
    case SourceLayout::kAwqInt4: return {pack_lines_awq, true};
    case SourceLayout::kGptqInt4: return {pack_lines_gptq, false};
    case SourceLayout::kPlain: break;
    default: return {pack_lines_row_major, false};
  }
  if (source.col_stride == 1) return {pack_lines_row_major, false};
  if (source.code == code && code_bits(code) >= 8) return {pack_lines_strided, true};
  return {pack_lines_reference, false};
}

}  // namespace

void pack_panels(const SourceMatrix& source, const PanelLayout& layout, const PanelRange& panels, std::byte* target) {
  if (panels.count == 0) return;
  check_packing(source, layout, panels.first);
  check_packing(source, layout, panels.first + panels.count - 1);
  const Packer packer = packer_of(source, layout.format.code);
  const uint32_t lines = layout.k_padded / (32 / code_bits(layout.format.code));
  const uint32_t step = packer.shares_cache_lines ? kSharedLines : lines;
  for (uint32_t begin = 0; begin < lines; begin += step) {
    const uint32_t end = std::min(begin + step, lines);
    for (uint32_t i = 0; i < panels.count; ++i) {
      std::byte* const panel = target + i * panels.target_stride;
      packer.lines(source, layout, {panels.first + i, begin, end}, panel + size_t{begin} * 64);
    }
  }
  for (uint32_t i = 0; i < panels.count; ++i) {
    pack_panel_scales(source, layout, panels.first + i, target + i * panels.target_stride);
  }
}

void pack_panel(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target) {
  pack_panels(source, layout, {panel, 1, layout.panel_bytes}, target);
}

}  // namespace moebius
