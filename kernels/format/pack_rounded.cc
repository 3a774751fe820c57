#include "kernels/format/pack_rounded.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/format/decode_codes.h"
#include "kernels/format/source_access.h"

namespace moebius {
namespace {

// A source's scales and minimums of some of its rows, in float16.
struct HalfScales {
  std::vector<uint16_t> scales;    // [rows][groups]
  std::vector<uint16_t> minimums;  // the same, or empty
};

uint16_t rounded(float value) {
  const uint16_t bits = encode_float16(value);
  if ((bits & 0x7fff) != 0x7c00) return bits;
  throw std::invalid_argument("a group scale or minimum of " + std::to_string(value) +
                              " is beyond float16, which experts keep (at most 65504)");
}

HalfScales round_scales(const SourceMatrix& source, uint32_t begin, uint32_t end, uint32_t groups) {
  HalfScales halves;
  for (uint32_t row = begin; row < end; ++row) {
    for (uint32_t group = 0; group < groups; ++group) {
      halves.scales.push_back(rounded(source_scale(source, row, group)));
      if (source.minimums != nullptr) halves.minimums.push_back(rounded(source_minimum(source, row, group)));
    }
  }
  return halves;
}

// What code q of a group means: scale * q + minimum.
struct Line {
  double scale;
  double minimum;
};

// Sum over codes of (scale * q + minimum)^2, from the sums of their powers.
double sum_of_squares(Line line, double count, double sum, double squares) {
  return line.scale * line.scale * squares + 2 * line.scale * line.minimum * sum + line.minimum * line.minimum * count;
}

class ErrorOfRounding {
 public:
  ErrorOfRounding(const SourceMatrix& source, const HalfScales& halves, uint32_t first_row, uint32_t groups)
      : source_(source), halves_(halves), first_row_(first_row), groups_(groups), codes_(source.group_size) {}

  void add_row(uint32_t row, PackError& error) {
    for (uint32_t group = 0; group < groups_; ++group) {
      const uint32_t begin = group * source_.group_size;
      const uint32_t count = std::min(source_.group_size, source_.cols - begin);
      decode_codes(source_, row, begin, count, codes_.data());
      const auto zero = source_.code == Code::kInt4 ? static_cast<float>(source_zero(source_, row, group)) : 0.0f;
      float sum = 0.0f, squares = 0.0f;  // whole numbers below 2^24: exact
      for (uint32_t i = 0; i < count; ++i) {
        const float code = codes_[i] - zero;
        sum += code;
        squares += code * code;
      }
      const Line stored{source_scale(source_, row, group), source_minimum(source_, row, group)};
      const size_t entry = size_t{row - first_row_} * groups_ + group;
      const Line kept{decode_float16(halves_.scales[entry]),
                      halves_.minimums.empty() ? 0.0 : decode_float16(halves_.minimums[entry])};
      const Line change{kept.scale - stored.scale, kept.minimum - stored.minimum};
      error.squared_error += sum_of_squares(change, count, sum, squares);
      error.squared_reference += sum_of_squares(stored, count, sum, squares);
    }
  }

 private:
  const SourceMatrix& source_;
  const HalfScales& halves_;
  const uint32_t first_row_;
  const uint32_t groups_;
  std::vector<float> codes_;
};

}  // namespace

bool packs_with_rounded_scales(const SourceMatrix& source, const WeightFormat& format) {
  if (source.scale_type != ScaleType::kFloat32 || format.scale != ScaleType::kFloat16 || source.scale_rows != 1) {
    return false;
  }
  SourceMatrix halves = source;
  halves.scale_type = ScaleType::kFloat16;
  return packs_exactly(halves, format);
}

PackError pack_with_rounded_scales(const SourceMatrix& source, const PanelLayout& layout, const PanelRange& panels,
                                   std::byte* target) {
  PackError error;
  const uint32_t begin = std::min(panels.first * kPanelColumns, source.rows);
  const uint32_t end = std::min((panels.first + panels.count) * kPanelColumns, source.rows);
  if (begin == end) return error;
  const HalfScales halves = round_scales(source, begin, end, layout.groups);
  SourceMatrix exact = source;
  exact.scale_type = ScaleType::kFloat16;
  exact.scale_row_stride = layout.groups;
  exact.scale_group_stride = 1;
  exact.scale_row_begin = 0U - begin;  // rows count from the matrix's first one; unsigned sums wrap around
  exact.scales = halves.scales.data();
  if (source.minimums != nullptr) exact.minimums = halves.minimums.data();
  pack_panels(exact, layout, panels, target);
  ErrorOfRounding rounding(source, halves, begin, layout.groups);
  for (uint32_t row = begin; row < end; ++row) rounding.add_row(row, error);
  return error;
}

}  // namespace moebius
