// Single elements of a SourceMatrix: what each checkpoint layout means, literally. Fast loops elsewhere are
// tested against these. `row` is an output feature, `k` an input feature, `group` is k / group_size.
//
//   compressed-tensors  pack_to_int32: values + 8, element j of a word in bits 4j..4j+3, padded to whole words;
//                       zero points are packed the same way along out
//   AutoAWQ             WQLinear_GEMM.from_linear: order_map 0 2 4 6 1 3 5 7 (nibble i holds column order_map[i])
//   AutoGPTQ            QuantLinear.pack: zeros - 1, and unpacking adds 1 and keeps 4 bits
//   MXFP4, NVFP4        two e2m1 a byte, the element of even k in the low nibble
#pragma once

#include <array>
#include <cstring>

#include "kernels/format/numbers.h"
#include "kernels/format/source_matrix.h"

namespace moebius {

// The nibble of an AWQ word that holds column c of its eight.
inline constexpr std::array<uint32_t, 8> kAwqNibbles = {0, 4, 1, 5, 2, 6, 3, 7};

inline uint32_t load_nibble(const void* words, ptrdiff_t index, uint32_t nibble) {
  return load_element<uint32_t>(words, index) >> (4 * nibble) & 15;
}

// Words of 32 elements, of kGridWords.
inline uint32_t grid_source_words(Code code) {
  return code == Code::kIq2Xxs || code == Code::kIq2Xs || is_iq1(code) || code == Code::kTq1 ? 2 : 4;
}

// Bytes of the elements that row_stride and col_stride count.
inline size_t source_unit_bytes(const SourceMatrix& source) {
  if (source.layout == SourceLayout::kMxfp4 || source.layout == SourceLayout::kNvfp4) return 1;
  if (source.layout != SourceLayout::kPlain) return 4;
  const uint32_t bits = code_bits(source.code);
  return bits < 8 ? 1 : bits / 8;
}

// The bits of an element, in the low bits. Not of kGridWords.
inline uint32_t source_code(const SourceMatrix& source, uint32_t row, uint32_t k) {
  const auto r = static_cast<ptrdiff_t>(row);
  const auto c = static_cast<ptrdiff_t>(k);
  const ptrdiff_t stride = source.row_stride;
  switch (source.layout) {
    case SourceLayout::kCompressedInt4: return load_nibble(source.data, r * stride + c / 8, k % 8);
    case SourceLayout::kAwqInt4: return load_nibble(source.data, c * stride + r / 8, kAwqNibbles[row % 8]);
    case SourceLayout::kGptqInt4: return load_nibble(source.data, c / 8 * stride + r, k % 8);
    case SourceLayout::kMxfp4:
    case SourceLayout::kNvfp4: return load_element<uint8_t>(source.data, r * stride + c / 2) >> (k % 2 * 4) & 15U;
    case SourceLayout::kGridWords:
    case SourceLayout::kPlain: break;
  }
  const ptrdiff_t index = r * stride + c * source.col_stride;
  switch (code_bits(source.code)) {
    case 32: return load_element<uint32_t>(source.data, index);
    case 16: return load_element<uint16_t>(source.data, index);
    case 8: return load_element<uint8_t>(source.data, index);
    default: return load_element<uint8_t>(source.data, index) & ((1U << code_bits(source.code)) - 1);
  }
}

inline ptrdiff_t source_scale_index(const SourceMatrix& source, uint32_t row, uint32_t group) {
  return static_cast<ptrdiff_t>((row + source.scale_row_begin) / source.scale_rows) * source.scale_row_stride +
         static_cast<ptrdiff_t>(group) * source.scale_group_stride;
}

// An element of scales or mins.
inline float load_source_scale(ScaleType type, const void* scales, ptrdiff_t index) {
  if (type == ScaleType::kProducts) return decode_product_word(load_element<uint32_t>(scales, index));
  return load_scale(type, scales, index);
}

inline float source_scale(const SourceMatrix& source, uint32_t row, uint32_t group) {
  return load_source_scale(source.scale_type, source.scales, source_scale_index(source, row, group));
}

// 0 without any.
inline float source_min(const SourceMatrix& source, uint32_t row, uint32_t group) {
  if (source.mins == nullptr) return 0.0f;
  return load_source_scale(source.scale_type, source.mins, source_scale_index(source, row, group));
}

// What codes have subtracted: 0..15 of kInt4.
inline uint32_t source_zero(const SourceMatrix& source, uint32_t row, uint32_t group) {
  if (source.mins != nullptr) return 0;
  if (source.zeros == nullptr) return code_middle(source.code);
  const auto r = static_cast<ptrdiff_t>(row);
  const auto g = static_cast<ptrdiff_t>(group);
  const ptrdiff_t stride = source.zeros_stride;
  uint32_t stored = 0;
  switch (source.layout) {
    case SourceLayout::kCompressedInt4: stored = load_nibble(source.zeros, r / 8 * stride + g, row % 8); break;
    case SourceLayout::kAwqInt4: stored = load_nibble(source.zeros, g * stride + r / 8, kAwqNibbles[row % 8]); break;
    case SourceLayout::kGptqInt4: stored = load_nibble(source.zeros, g * stride + r / 8, row % 8); break;
    default: stored = load_element<uint8_t>(source.zeros, r * stride + g);
  }
  return (stored + static_cast<uint32_t>(source.zeros_offset)) & 15U;
}

inline float source_column_scale(const SourceMatrix& source, uint32_t row) {
  return source.column_scale == nullptr ? source.tensor_scale : source.column_scale[row] * source.tensor_scale;
}

}  // namespace moebius
