// Whole experts. Where only scales have to be rounded, codes stay as they are.
#include "kernels/format/expert_packing.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/format/dequantise.h"
#include "kernels/format/pack.h"
#include "kernels/format/panel_layout.h"
#include "kernels/format/requantise.h"
#include "kernels/format/source_access.h"
#include "kernels/format/source_matrix.h"

namespace moebius {

// Whether nothing keeps `source` from being packed as `format` but float32 scales (and mins) where the format
// has float16 ones: products of two stored numbers, such as those of GGUF's Q4_K and Q6_K.
bool packs_with_rounded_scales(const SourceMatrix& source, const WeightFormat& format);

// As pack_panels, scales and mins rounded to nearest even; returns what that changes of the weights. Throws
// std::invalid_argument naming a scale that float16 has no finite number for.
PackError pack_with_rounded_scales(const SourceMatrix& source, const PanelLayout& layout, const PanelRange& panels,
                                   std::byte* target);

namespace {

// A source's scales and mins of some of its rows, in float16.
struct HalfScales {
  std::vector<uint16_t> scales;    // [rows][groups]
  std::vector<uint16_t> mins;  // the same, or empty
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
      if (source.mins != nullptr) halves.mins.push_back(rounded(source_min(source, row, group)));
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
      const Line stored{source_scale(source_, row, group), source_min(source_, row, group)};
      const size_t entry = size_t{row - first_row_} * groups_ + group;
      const Line kept{decode_float16(halves_.scales[entry]),
                      halves_.mins.empty() ? 0.0 : decode_float16(halves_.mins[entry])};
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
  if (source.mins != nullptr) exact.mins = halves.mins.data();
  pack_panels(exact, layout, panels, target);
  ErrorOfRounding rounding(source, halves, begin, layout.groups);
  for (uint32_t row = begin; row < end; ++row) rounding.add_row(row, error);
  return error;
}

namespace {

void check_shape(const char* name, const SourceMatrix& source, uint32_t rows, uint32_t cols) {
  if (source.rows == rows && source.cols == cols) return;
  throw std::invalid_argument(std::string(name) + " has shape [" + std::to_string(source.rows) + ", " +
                              std::to_string(source.cols) + "]; it must be [" + std::to_string(rows) + ", " +
                              std::to_string(cols) + "]");
}

void add(PackError& sum, const PackError& error) {
  sum.squared_error += error.squared_error;
  sum.squared_reference += error.squared_reference;
}

PackError pack_range(const SourceMatrix& source, const PanelLayout& layout, const PanelRange& panels,
                     std::byte* target) {
  PackError sum;
  if (packs_exactly(source, layout.format)) {
    pack_panels(source, layout, panels, target);
    return sum;
  }
  if (packs_with_rounded_scales(source, layout.format)) {
    return pack_with_rounded_scales(source, layout, panels, target);
  }
  for (uint32_t i = 0; i < panels.count; ++i) {
    add(sum, requantise_panel(source, layout, panels.first + i, target + i * panels.target_stride));
  }
  return sum;
}

PackError pack_named(const char* name, const SourceMatrix& source, const PanelLayout& layout, const PanelRange& panels,
                     std::byte* target) {
  try {
    return pack_range(source, layout, panels, target);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(name) + ": " + error.what());
  }
}

// Gate and up meet the same rows, so they have one order; without one the order is that of the checkpoint.
void pack_order(const ExpertLayout& layout, const ExpertSource& source, std::byte* target) {
  const uint32_t count = layout.hidden_size;
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  const std::vector<uint32_t> all = order;
  const uint32_t* const found = source.up.order;
  if (layout.gated) {
    const uint32_t* const other = source.gate.order;
    if ((found == nullptr) != (other == nullptr) || (found != nullptr && !std::equal(found, found + count, other))) {
      throw std::invalid_argument("gate and up have their columns in different orders");
    }
  }
  if (found != nullptr) {
    std::copy(found, found + count, order.begin());
    std::vector<uint32_t> sorted = order;
    std::sort(sorted.begin(), sorted.end());
    if (sorted != all) throw std::invalid_argument("order: it must have each of the columns once");
  }
  std::memset(target + layout.order_offset, 0, layout.expert_bytes - layout.order_offset);
  std::memcpy(target + layout.order_offset, order.data(), count * sizeof(uint32_t));
}

}  // namespace

uint32_t expert_parts(const ExpertLayout& layout) { return layout.intermediate_blocks + layout.down_panels; }

PackError pack_expert_parts(const ExpertLayout& layout, const ExpertSource& source, uint32_t begin, uint32_t end,
                            std::byte* target) {
  if (begin > end || end > expert_parts(layout)) {
    throw std::invalid_argument("parts " + std::to_string(begin) + " to " + std::to_string(end) + " of an expert of " +
                                std::to_string(expert_parts(layout)));
  }
  if (layout.gated) check_shape("gate", source.gate, layout.intermediate_size, layout.hidden_size);
  check_shape("up", source.up, layout.intermediate_size, layout.hidden_size);
  check_shape("down", source.down, layout.hidden_size, layout.intermediate_size);
  if (begin == 0 && layout.gate_up.format.ordered) pack_order(layout, source, target);
  PackError sum;
  const uint32_t blocks_end = std::min(end, layout.intermediate_blocks);
  if (begin < blocks_end) {
    const size_t block_bytes = layout.panels_per_column_block * layout.gate_up.panel_bytes;
    const PanelRange panels{begin, blocks_end - begin, block_bytes};
    std::byte* const blocks = target + begin * block_bytes;
    if (layout.gated) add(sum, pack_named("gate", source.gate, layout.gate_up, panels, blocks));
    add(sum, pack_named("up", source.up, layout.gate_up, panels,
                        blocks + (layout.panels_per_column_block - 1) * layout.gate_up.panel_bytes));
  }
  if (end > layout.intermediate_blocks) {
    const uint32_t first = std::max(begin, layout.intermediate_blocks) - layout.intermediate_blocks;
    const PanelRange panels{first, end - layout.intermediate_blocks - first, layout.down.panel_bytes};
    std::byte* const down = target + layout.down_offset + first * layout.down.panel_bytes;
    add(sum, pack_named("down", source.down, layout.down, panels, down));
  }
  return sum;
}

PackError pack_expert(const ExpertLayout& layout, const ExpertSource& source, std::byte* target) {
  return pack_expert_parts(layout, source, 0, expert_parts(layout), target);
}

}  // namespace moebius
