// One matrix as a checkpoint stores it, before packing. All pointers belong to the caller.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/weight_format.h"

namespace moebius {

// How codes, scales and zeros lie in the checkpoint. `out` and `in` are the logical matrix's [out, in].
enum class SourceLayout : uint8_t {
  // One element each (kInt4, kFloat4: one code per byte), any strides; zeros uint8 [out, groups].
  kPlain = 0,
  // compressed-tensors weight_packed: int32 [out, in / 8], nibble j of a word is element j, stored as code + 8 for
  // symmetric; scales [out, groups]; zeros packed likewise along out, int32 [out / 8, groups].
  kCompressedInt4 = 1,
  // qweight int32 [in, out / 8]: bits 0-3 hold column 0, bits 4-7 column 2, then 4, 6, 1, 3, 5, 7; qzeros int32
  // [groups, out / 8] likewise; scales [groups, out].
  kAwqInt4 = 2,
  // qweight int32 [in / 8, out], nibble j of a word is element j along in; qzeros int32 [groups, out / 8] holding
  // zero - 1 in version 1 checkpoints (see zeros_offset); scales [groups, out].
  kGptqInt4 = 3,
  // blocks uint8 [out, in / 2], low nibble first; scales e8m0 uint8 [out, groups].
  kMxfp4 = 4,
  // weight uint8 [out, in / 2], low nibble first; scales e4m3 uint8 [out, groups]; global scale in tensor_scale.
  kNvfp4 = 5,
  // Rows of a grid: words of 32 elements as panels have them, of iq3_s and iq2_s then one whose lowest byte has signs.
  // Two words (iq2_xxs, iq2_xs) or four, what is left of which is not read.
  kGridWords = 6,
};

struct SourceMatrix {
  SourceLayout layout = SourceLayout::kPlain;
  Code code = Code::kFloat32;     // element code; kInt4, kFloat4 or a code of grids for the packed layouts
  uint32_t rows = 0;              // out, of this slice
  uint32_t cols = 0;              // in, of this slice
  const void* data = nullptr;     // first element (or word, or byte) of the slice
  ptrdiff_t row_stride = 0;       // elements (words, bytes) between logical rows; for kAwqInt4 and kGptqInt4:
                                  // between rows of the stored matrix
  ptrdiff_t col_stride = 1;       // kPlain: elements between logical columns

  ScaleType scale_type = ScaleType::kNone;
  uint32_t group_size = 0;        // along in; 0: no group scales
  uint32_t scale_rows = 1;        // logical rows sharing a scale row: 128 for fp8 blocks, 1 for the rest
  // Scale of (logical row r, group g) at the place below; products (kProducts) as words of 32 bits, see
  // decode_product_word.
  const void* scales = nullptr;
  ptrdiff_t scale_row_stride = 0; //   (r + scale_row_begin) / scale_rows * scale_row_stride + g * scale_group_stride
  ptrdiff_t scale_group_stride = 1;
  uint32_t scale_row_begin = 0;   // how far into its block of scale_rows the slice begins

  const void* zeros = nullptr;    // packed as the layout says; null: symmetric (zero point 8)
  ptrdiff_t zeros_stride = 0;     // words between stored rows of zeros
  int32_t zeros_offset = 0;       // added to every stored zero, modulo 16: 1 for GPTQ version 1

  const void* mins = nullptr; // what code 0 means, laid out and typed as the scales are; null: as zeros say

  const float* column_scale = nullptr;  // [rows] float32 scale per logical row; null: 1
  float tensor_scale = 1.0f;            // times column_scale: per-tensor and global scales
  const float* bias = nullptr;          // [rows]; null: none
  // Columns are sorted: column c here is column order[c] of the checkpoint's matrix. Null: they are as there.
  const uint32_t* order = nullptr;      // [cols]
};

}  // namespace moebius
