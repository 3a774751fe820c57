#include "tests/kernels/fuzz/fuzz_source.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/format/numbers.h"
#include "kernels/format/panel_values.h"
#include "kernels/format/requantise.h"
#include "kernels/format/source_access.h"

namespace moebius::fuzz {
namespace {

uint32_t groups_of(uint32_t cols, uint32_t group_size) { return (cols + group_size - 1) / group_size; }

class Builder {
 public:
  Builder(const WeightFormat& format, uint32_t rows, uint32_t cols, Random& random)
      : format_(format), rows_(rows), cols_(cols), random_(random) {
    matrix().rows = rows;
    matrix().cols = cols;
  }

  FuzzSource build(bool has_bias) {
    if (can_requantise_to(format_) && random_.one_in(6)) {
      plain(Code::kFloat32);
    } else {
      codes();
      scales();
    }
    if (has_bias) matrix().bias = floats(rows_, 0.5f);
    return std::move(source_);
  }

 private:
  SourceMatrix& matrix() { return source_.matrix; }

  std::byte* buffer(size_t bytes) {
    // Freshly allocated to the byte, so that a sanitizer sees one read too many.
    source_.buffers.emplace_back(bytes);
    return source_.buffers.back().data();
  }

  std::byte* random_bytes(size_t bytes) {
    std::byte* data = buffer(bytes);
    for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(random_.bits());
    return data;
  }

  const float* floats(size_t count, float scale) {
    auto* data = reinterpret_cast<float*>(buffer(count * sizeof(float)));
    for (size_t i = 0; i < count; ++i) data[i] = scale * random_.normal();
    return data;
  }

  // One element each: rows or columns contiguous, with or without a gap between them.
  void plain(Code code) {
    matrix().layout = SourceLayout::kPlain;
    matrix().code = code;
    const bool transposed = random_.one_in(3);
    const uint32_t gap = random_.one_in(3) ? random_.below(20) : 0;
    matrix().row_stride = transposed ? 1 : cols_ + gap;
    matrix().col_stride = transposed ? rows_ + gap : 1;
    const size_t width = code_bits(code) < 8 ? 1 : code_bits(code) / 8;
    const size_t last = size_t{rows_ - 1} * matrix().row_stride + size_t{cols_ - 1} * matrix().col_stride;
    std::byte* data = buffer((last + 1) * width);
    matrix().data = data;
    for (size_t i = 0; i <= last; ++i) {
      const uint32_t element = element_bits(code);
      std::memcpy(data + i * width, &element, width);
    }
  }

  // A finite element whose value is of order 1, or of the order that scales() brings down to it.
  uint32_t element_bits(Code code) {
    const float weight = random_.normal() / std::sqrt(static_cast<float>(cols_));
    switch (code) {
      case Code::kFloat32: return std::bit_cast<uint32_t>(weight);
      case Code::kBFloat16: return std::bit_cast<uint32_t>(weight) >> 16;
      case Code::kFloat16: return random_.below(0x2c00 - 0x2000) + 0x2000 + (random_.one_in(2) ? 0x8000 : 0);
      case Code::kFloat8: return random_.below(0x7f) | (random_.one_in(2) ? 0x80 : 0);
      case Code::kInt8: return random_.bits() & 0xff;
      default: return random_.bits() & ((1U << code_bits(code)) - 1);
    }
  }

  void codes() {
    if (is_grid(format_.code)) return grid_words();
    const bool int4 = format_.code == Code::kInt4;
    const bool float4 = format_.code == Code::kFloat4;
    const uint32_t choice = int4 ? random_.below(4) : float4 ? random_.below(2) : 0;
    if (choice == 0) return plain(format_.code);
    if (float4) return packed(format_.group_size == 16 ? SourceLayout::kNvfp4 : SourceLayout::kMxfp4, 1, 2);
    switch (choice) {
      case 1: return packed(SourceLayout::kCompressedInt4, 4, 8);
      case 2: return packed_columns(SourceLayout::kAwqInt4, cols_, (rows_ + 7) / 8);
      default: return packed_columns(SourceLayout::kGptqInt4, (cols_ + 7) / 8, rows_);
    }
  }

  // Whole words of 32, which may have more elements than a row.
  void grid_words() {
    matrix().layout = SourceLayout::kGridWords;
    matrix().code = format_.code;
    matrix().row_stride = groups_of(cols_, 32) * grid_source_words(format_.code);
    matrix().data = random_bytes(size_t{rows_} * static_cast<size_t>(matrix().row_stride) * 4);
  }

  void packed(SourceLayout layout, uint32_t unit_bytes, uint32_t per_unit) {
    matrix().layout = layout;
    matrix().code = format_.code;
    matrix().row_stride = (cols_ + per_unit - 1) / per_unit;
    matrix().data = random_bytes(size_t{rows_} * matrix().row_stride * unit_bytes);
  }

  void packed_columns(SourceLayout layout, uint32_t stored_rows, uint32_t stored_cols) {
    matrix().layout = layout;
    matrix().code = format_.code;
    matrix().row_stride = stored_cols;
    matrix().data = random_bytes(size_t{stored_rows} * stored_cols * 4);
  }

  // What a scale has to be for value * scale to have a standard deviation of 1 / sqrt(cols).
  float scale_target() const {
    // Of random codes.
    static constexpr float kSpread[] = {1.0f, 1.0f, 1.0f, 160.0f, 74.0f, 4.6f, 2.9f, 1.2f,
                                        2.3f, 9.2f, 18.5f, 66.0f, 9.2f,  9.2f, 3.2f, 0.7f, 3.2f, 3.2f, 0.7f, 0.8f};
    return 1.0f / (kSpread[static_cast<size_t>(format_.code)] * std::sqrt(static_cast<float>(cols_)));
  }

  void scales() {
    if (format_.group_size != 0) group_scales();
    if (format_.mins) mins();
    if (format_.zeros && !random_.one_in(4)) zeros();
    if (!format_.column_scale) return;
    // Where there are group scales of e4m3, those are of order 1 and the column scale does the rest.
    if (random_.one_in(3)) {
      matrix().tensor_scale = scale_target();
      return;
    }
    auto* data = reinterpret_cast<float*>(buffer(rows_ * sizeof(float)));
    for (uint32_t row = 0; row < rows_; ++row) data[row] = scale_target() * (0.5f + random_.uniform());
    matrix().column_scale = data;
  }

  void group_scales() {
    const uint32_t groups = groups_of(cols_, format_.group_size);
    const bool stored_by_group =
        matrix().layout == SourceLayout::kAwqInt4 || matrix().layout == SourceLayout::kGptqInt4;
    matrix().scale_type = format_.scale;
    matrix().group_size = format_.group_size;
    if (format_.panel_scale) {
      matrix().scale_rows = 128;
      matrix().scale_row_begin = random_.one_in(2) ? 16 * random_.below(8) : 0;
    }
    const uint32_t scale_rows = (rows_ - 1 + matrix().scale_row_begin) / matrix().scale_rows + 1;
    matrix().scale_row_stride = stored_by_group ? 1 : groups;
    matrix().scale_group_stride = stored_by_group ? scale_rows : 1;
    scale_count_ = size_t{scale_rows} * groups;
    matrix().scales = scale_array(0);
  }

  // About what brings the codes' mean to zero, laid out as the scales are.
  void mins() {
    const auto middle = static_cast<float>(code_middle(format_.code));
    matrix().mins = scale_array(middle == 0.0f ? -15.5f : 0.5f - middle);
  }

  // scale_count_ scales, times `factor` unless it is 0.
  const std::byte* scale_array(float factor) {
    const bool products = matrix().scale_type == ScaleType::kProducts;
    const size_t width = products ? 4 : scale_bytes(matrix().scale_type);
    const size_t groups = groups_of(cols_, format_.group_size);
    std::byte* data = buffer(scale_count_ * width);
    for (size_t row = 0; row < scale_count_ / groups; ++row) {
      uint32_t shared = 0;
      for (size_t group = 0; group < groups; ++group) {
        uint32_t bits = scale_bits(factor);
        if (products) {
          // A word: a float16 factor, which some groups of a row share, and the whole number that multiplies it.
          if (group % PanelLayout(format_, cols_, false).factor_groups == 0) shared = bits & 0xffff;
          bits = shared | whole_number(row, group) << 16;
        }
        const size_t place = row * matrix().scale_row_stride + group * matrix().scale_group_stride;
        std::memcpy(data + place * width, &bits, width);
      }
    }
    return data;
  }

  // Of rows of a grid the one that their words have.
  uint32_t whole_number(size_t row, size_t group) {
    if (!is_grid(format_.code)) {
      return 1 + random_.below(format_.code == Code::kInt2 ? 15 : format_.code == Code::kInt3 ? 31 : 63);
    }
    const PanelLayout layout(format_, cols_, false);
    if (layout.whole_low_bits != 0) {
      return random_.below(1U << (layout.whole_low_bits + layout.whole_high_bits)) * 2 + 1;
    }
    if (format_.code == Code::kIq1S) {
      const size_t signs = row * static_cast<size_t>(matrix().row_stride) + group * 2 + 1;
      return iq1_s_scale(load_element<uint32_t>(matrix().data, static_cast<ptrdiff_t>(signs))) * 2 + 1;
    }
    if (format_.code == Code::kTq1) return 1;
    const bool is_3 = format_.code == Code::kIq3Xxs;
    const size_t word = row * static_cast<size_t>(matrix().row_stride) + group * (is_3 ? 4 : 2) + (is_3 ? 2 : 1);
    return (load_element<uint32_t>(matrix().data, static_cast<ptrdiff_t>(word)) >> 28) * 2 + 1;
  }

  uint32_t scale_bits(float factor) {
    const float scale = scale_target() * (0.5f + random_.uniform()) * (factor == 0.0f ? 1.0f : factor);
    const uint32_t bits = std::bit_cast<uint32_t>(scale);
    switch (matrix().scale_type) {
      case ScaleType::kFloat32: return bits;
      case ScaleType::kBFloat16: return bits >> 16;
      case ScaleType::kFloat16: return encode_float16(scale);
      case ScaleType::kProducts: return encode_float16(scale / 32.0f);
      case ScaleType::kE8M0: return bits >> 23;
      default: return 0x30 + random_.below(0x10);  // e4m3: 0.5 to 1.9, the column scale does the rest
    }
  }

  void zeros() {
    const uint32_t groups = groups_of(cols_, format_.group_size);
    const uint32_t words = (rows_ + 7) / 8;
    switch (matrix().layout) {
      case SourceLayout::kCompressedInt4:
        matrix().zeros_stride = groups;
        matrix().zeros = random_bytes(size_t{words} * groups * 4);
        return;
      case SourceLayout::kAwqInt4:
      case SourceLayout::kGptqInt4:
        matrix().zeros_stride = words;
        matrix().zeros = random_bytes(size_t{words} * groups * 4);
        matrix().zeros_offset = matrix().layout == SourceLayout::kGptqInt4 ? 1 : 0;
        return;
      default:
        matrix().zeros_stride = groups;
        std::byte* data = random_bytes(size_t{rows_} * groups);
        for (size_t i = 0; i < size_t{rows_} * groups; ++i) data[i] &= std::byte{15};
        matrix().zeros = data;
    }
  }

  const WeightFormat& format_;
  const uint32_t rows_;
  const uint32_t cols_;
  Random& random_;
  size_t scale_count_ = 0;
  FuzzSource source_;
};

}  // namespace

FuzzSource draw_source(const WeightFormat& format, uint32_t rows, uint32_t cols, bool has_bias, Random& random) {
  return Builder(format, rows, cols, random).build(has_bias);
}

}  // namespace moebius::fuzz
