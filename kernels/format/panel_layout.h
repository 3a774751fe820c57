// The packed form of a matrix: panels of 16 columns (output features), each holding all of k, one after the
// other. One layout per format for every instruction set and for the GPU. Inside a panel, at 64-byte-aligned
// offsets:
//
//   codes         k_padded x 16, in "words" of 32 bits per column so that one 64-byte line is 16 columns:
//                   float32            line = 1 k
//                   bfloat16, float16  line = 2 k:  k, k+1 in bits 0-15, 16-31 of the column's word
//                   float8, int8       line = 4 k:  k..k+3 in bytes 0..3
//                   int4, float4       line = 8 k:  k+2j in bits 4j..4j+3, k+2j+1 in bits 16+4j..16+4j+3 (j = 0..3),
//                                      so that (word >> 4j) brings the pair (k+2j, k+2j+1) to the low bits of
//                                      the two halves; iq codes of 4 bits likewise
//                   2, 3, 5, 6 bits    32 k = as many lines as a code has bits, in planes. Of 32 codes there are eight
//                                      vectors of a byte for four k: vector 2i has k+8i+0, 4, 1, 5, vector 2i+1
//                                      k+8i+2, 6, 3, 7. First come the low 4 bits (5 and 6 bits: a line has two
//                                      vectors, as above) or the low 2 bits (2 and 3 bits: a line has four vectors,
//                                      vector v at bit 2 (v % 4) of each byte); then, of 6 bits, two lines of the
//                                      high 2 bits in the same way, of 3 and 5 bits a line of the highest bit,
//                                      vector v at bit v of each byte
//                   rows of a grid     32 k = three lines (iq3) or two (iq2). iq3_xxs, iq2_xxs: the rows' numbers,
//                                      one a byte from bit 0 on, of four k each (iq3) or eight; last a line of signs: 7
//                                      bits for eight k each, of which the eighth's makes the number of ones even;
//                                      bits 28-31 are s; the whole number of the group's scale is 2 s + 1. Numbers of 9
//                                      and 10 bits share words with signs, those of 11 (iq1, one line) lie in the
//                                      signs' section, too: grid_place() of panel_values.h
//                   tq1                32 k = one line: 20 digits in a word, then 10 in a uint16 of the signs' section,
//                                      two in 4 bits of it: trit() of panel_values.h
//   scales        [groups][16] of the format's scale type; [groups] when the format has panel_scale;
//                 products: [groups / factor_groups][16] float16 factors; then, from the next multiple of 64 bytes
//                 on, [groups][16] int8 (int2 with mins: 4 bits of the scale below 4 bits of the minimum; int3:
//                 [groups / 2][16] bytes of the low 4 bits of two numbers, the even group's below, then [groups / 4][16]
//                 of the high 2 bits of four, of numbers that are 32 more; rows of a grid: none, or [groups / 2][16]
//                 bytes of two s, of iq1_m 2 bits of four and then 1 bit of eight; of iq3_s, iq2_s then
//                 [k_padded / 32][16] bytes of signs, of iq1 and tq1 uint16, of tq1 then [k_padded / 64][16] bytes of
//                 4 bits of two; the whole numbers of tq1 are 1)
//   zeros         [groups][16] uint8                    (formats with zeros)
//   mins      [groups][16] of the scale type        (formats with mins; int2 with products: the factors alone)
//   column_scale  [16] float32                          (formats with column_scale)
//   bias          [16] float32                          (matrices with a bias)
//
// 16-bit lines are the B operand of a bf16 tile product (16 lines = one tile, k = 32), 8-bit lines that of an
// int8 tile product (k = 64). k is padded to a multiple of 64 and columns to whole panels; padding decodes to
// zero or meets zeros in the rows, whose own padding is zero.
//
// An expert: gate and up panels alternating (gate 0, up 0, gate 1, up 1, ...; up only where the activation has
// no gate; all gate panels, then all up panels, where their formats differ), then the down panels. Where gate's and
// up's format is ordered, then
//
//   order         [hidden_size] uint32: element i of a row that meets the panels is element order[i] of the
//                 request's row. Down needs none: gate's and up's columns are packed in the order of its k.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/weight_format.h"

namespace moebius {

constexpr uint32_t kPanelColumns = 16;
constexpr uint32_t kPadK = 64;

struct PanelLayout {
  PanelLayout() = default;
  // k > 0. Throws std::invalid_argument when the format is not supported.
  PanelLayout(const WeightFormat& format, uint32_t k, bool has_bias);

  WeightFormat format;
  uint32_t k = 0;
  uint32_t k_padded = 0;      // multiple of kPadK
  uint32_t groups = 0;        // ceil(k / group_size); 0 without group scales
  // Products: groups that share a factor, all of as many k as divide k and GGUF's blocks of 256. So a part of a matrix
  // that begins and ends inside of blocks, but at multiples of its own length, has the factors that it needs. Else 0.
  uint32_t factor_groups = 0;
  size_t whole_offset = 0;    // of products: bytes from a section's factors to its int8
  // Of products whose whole numbers have fewer than 8 bits and lie by themselves: bits of each in the bytes from
  // whole_offset on, and in those from whole_high_offset on, the first group's lowest; else 0. What numbers mean is
  // less 1 << (both - 1), or of rows of a grid 2 s + 1.
  uint32_t whole_low_bits = 0;
  uint32_t whole_high_bits = 0;
  size_t whole_high_offset = 0;  // as whole_offset
  bool joined = false;        // of products: whole numbers of scales and mins share the int8 of the scales' section
  bool has_bias = false;
  // Bytes from the panel's begin. What a format lacks has the offset where it would be.
  size_t scales_offset = 0;
  size_t signs_offset = 0;    // of rows of a grid, where words have not room for all
  size_t zeros_offset = 0;
  size_t mins_offset = 0;
  size_t column_scale_offset = 0;
  size_t bias_offset = 0;
  size_t panel_bytes = 0;     // a multiple of 64
};

struct ExpertLayout {
  ExpertLayout() = default;
  // gated: gate and up; otherwise up alone. Throws std::invalid_argument where gate's and up's formats differ and there
  // is no gate, or one of them is ordered or has quantised rows.
  ExpertLayout(const GateUpFormats& gate_up_formats, const WeightFormat& down_format, uint32_t hidden_size,
               uint32_t intermediate_size, bool gated, bool has_bias);

  PanelLayout gate;                // k = hidden_size; as gate_up, unless `mixed`
  PanelLayout gate_up;             // k = hidden_size; of up alone where formats differ
  PanelLayout down;                // k = intermediate_size
  bool mixed = false;              // gate and up have formats of their own
  // Panel i of gate lies at i * gate_step, that of up at up_offset + i * up_step.
  size_t gate_step = 0;
  size_t up_offset = 0;
  size_t up_step = 0;
  uint32_t hidden_size = 0;
  uint32_t intermediate_size = 0;
  bool gated = true;
  uint32_t panels_per_column_block = 2;  // gate and up: 2, up alone: 1
  uint32_t intermediate_blocks = 0;      // ceil(intermediate_size / 16)
  uint32_t down_panels = 0;              // ceil(hidden_size / 16)
  size_t down_offset = 0;
  size_t order_offset = 0;               // without an order, where it would be
  size_t expert_bytes = 0;               // a multiple of 64
};

}  // namespace moebius
