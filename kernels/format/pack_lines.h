// The parts of a panel: codes, some lines of 64 bytes at a time, for sources that run along k and along columns;
// scales and what else stands per column.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/panel_layout.h"
#include "kernels/format/source_matrix.h"

namespace moebius {

// Lines begin <= line < end of a panel; target points to line `begin`.
struct LineRange {
  uint32_t panel;
  uint32_t begin;
  uint32_t end;
};

using PackLines = void (*)(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                           std::byte* target);

// Any source, element by element.
void pack_lines_reference(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                          std::byte* target);

// Elements of a row are neighbours: plain with col_stride 1, compressed-tensors int4, MXFP4, NVFP4.
void pack_lines_row_major(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                          std::byte* target);

// Codes of 2, 3, 5 and 6 bits, one a byte. Lines begin and end at multiples of the bits of a code.
void pack_lines_planes(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                       std::byte* target);

// Rows of a grid, whose words are the source's. Lines begin and end at multiples of the words of 32 k.
void pack_lines_grid(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines, std::byte* target);
// The bytes of signs, of a code that has them, to a section of zeros.
void pack_grid_signs(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target);

// Elements of a column are neighbours or near: plain with any strides and equal codes of 8 bits and more, AWQ, GPTQ.
void pack_lines_awq(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines, std::byte* target);
void pack_lines_gptq(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                     std::byte* target);
void pack_lines_strided(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                        std::byte* target);

// --- The parts of a panel other than its codes.

// What padding elements hold: int4 code 8 (zero of a symmetric format), zero bits elsewhere.
uint32_t padding_code(Code code);

// Group scales, zero points, mins, column scales and bias of a panel. Columns beyond the last row get zero
// scales and mins, and zero point 8.
void pack_panel_scales(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target);

}  // namespace moebius
