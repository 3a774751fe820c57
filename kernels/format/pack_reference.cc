// Packing element by element, following panel_layout.h and source_access.h literally.
#include <bit>
#include <cstring>

#include "kernels/format/pack.h"
#include "kernels/format/pack_lines.h"
#include "kernels/format/source_access.h"

namespace moebius {
namespace {

uint32_t target_code(const SourceMatrix& source, const PanelLayout& layout, uint32_t row, uint32_t k) {
  if (row >= source.rows || k >= source.cols) return padding_code(layout.format.code);
  const uint32_t code = source_code(source, row, k);
  if (source.code == layout.format.code) return code;
  const auto half = static_cast<uint16_t>(code);
  return std::bit_cast<uint32_t>(source.code == Code::kBFloat16 ? decode_bfloat16(half) : decode_float16(half));
}

}  // namespace

void pack_lines_reference(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                          std::byte* target) {
  const uint32_t bits = code_bits(layout.format.code);
  const uint32_t per_word = 32 / bits;
  for (uint32_t line = lines.begin; line < lines.end; ++line) {
    for (uint32_t column = 0; column < kPanelColumns; ++column) {
      uint32_t word = 0;
      for (uint32_t i = 0; i < per_word; ++i) {
        const uint32_t place = bits == 4 ? i % 2 * 4 + i / 2 : i;  // even k in the low half, odd k in the high half
        const uint32_t code = target_code(source, layout, lines.panel * kPanelColumns + column, line * per_word + i);
        word |= code << (place * bits);
      }
      std::memcpy(target, &word, sizeof(word));
      target += sizeof(word);
    }
  }
}

void pack_panel_reference(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target) {
  check_packing(source, layout, panel);
  const uint32_t lines = layout.k_padded / (32 / code_bits(layout.format.code));
  pack_lines_reference(source, layout, {panel, 0, lines}, target);
  pack_panel_scales(source, layout, panel, target);
}

}  // namespace moebius
