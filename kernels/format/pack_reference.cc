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

// Codes of 2, 3, 5 and 6 bits: 32 k in as many lines as a code has bits.
void pack_plane_reference(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target) {
  const uint32_t bits = code_bits(layout.format.code);
  const uint32_t low_bits = bits < 4 ? 2 : 4;
  auto* const bytes = reinterpret_cast<uint8_t*>(target);
  std::memset(bytes, 0, size_t{layout.k_padded} * 2 * bits);
  const auto place = [](uint32_t vector, uint32_t width) { return vector % (8 / width) * width; };
  for (uint32_t k = 0; k < layout.k_padded; ++k) {
    const uint32_t vector = k % 32 / 8 * 2 + k / 2 % 2;
    for (uint32_t column = 0; column < kPanelColumns; ++column) {
      const uint32_t code = target_code(source, layout, panel * kPanelColumns + column, k);
      uint8_t* const at = bytes + size_t{k / 32} * bits * 64 + column * 4 + k % 8 / 4 + k % 2 * 2;
      const auto put = [&](uint32_t line, uint32_t width, uint32_t value) {
        at[size_t{line + vector / (8 / width)} * 64] |= static_cast<uint8_t>(value << place(vector, width));
      };
      put(0, low_bits, code & ((1U << low_bits) - 1));
      if (bits > low_bits) put(low_bits, bits - low_bits, code >> low_bits);
    }
  }
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
  const uint32_t bits = code_bits(layout.format.code);
  if (is_grid(layout.format.code)) {
    pack_lines_grid(source, layout, {panel, 0, layout.k_padded * bits / 32}, target);
  } else if (bits < 8 && bits != 4) {
    pack_plane_reference(source, layout, panel, target);
  } else {
    pack_lines_reference(source, layout, {panel, 0, layout.k_padded * bits / 32}, target);
  }
  pack_panel_scales(source, layout, panel, target);
}

}  // namespace moebius
