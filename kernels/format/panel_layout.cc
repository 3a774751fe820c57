#include "kernels/format/panel_layout.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace moebius {
namespace {

constexpr uint32_t kMaxK = 1U << 30;

size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }
constexpr uint32_t kFactorK = 256;  // that one factor of products is for, at most

uint32_t ceil_div(uint32_t value, uint32_t divisor) { return (value + divisor - 1) / divisor; }

void check_size(const char* name, uint32_t value) {
  if (value > 0 && value <= kMaxK) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be 1 to " +
                              std::to_string(kMaxK));
}

void check_mixed(const GateUpFormats& formats, bool gated) {
  std::string problem;
  if (!gated) problem = "there is no gate";
  for (const WeightFormat& format : {formats.gate, formats.up}) {
    if (format.ordered) problem = "an order serves both";
    if (format.quantised_rows) problem = "both need the same rows";
  }
  if (problem.empty()) return;
  throw std::invalid_argument("gate is " + weight_format_name(formats.gate) + ", up " + weight_format_name(formats.up) +
                              ": they must be the same, because " + problem);
}

}  // namespace

PanelLayout::PanelLayout(const WeightFormat& weight_format, uint32_t matrix_k, bool with_bias)
    : format(weight_format), k(matrix_k), has_bias(with_bias) {
  check_weight_format(format);
  check_size("k", k);
  k_padded = ceil_div(k, kPadK) * kPadK;
  groups = format.group_size == 0 ? 0 : ceil_div(k, format.group_size);
  scales_offset = size_t{k_padded} * kPanelColumns * code_bits(format.code) / 8;
  const size_t scale_columns = format.panel_scale ? 1 : kPanelColumns;
  if (format.scale == ScaleType::kProducts) {
    factor_groups = std::max(format.group_size, std::gcd(k, kFactorK)) / format.group_size;
    joined = format.mins && format.code == Code::kInt2;
    whole_offset = align64(size_t{ceil_div(groups, factor_groups)} * kPanelColumns * sizeof(uint16_t));
    switch (format.code) {
      case Code::kInt3: whole_low_bits = 4, whole_high_bits = 2; break;
      case Code::kIq1M: whole_low_bits = 2, whole_high_bits = 1; break;
      case Code::kIq3S:
      case Code::kIq2Xs:
      case Code::kIq2S: whole_low_bits = 4; break;
      default: break;
    }
  }
  size_t scale_rows = groups * size_t{scale_bytes(format.scale)};
  if (whole_low_bits != 0) {
    const uint32_t low_rows = ceil_div(groups * whole_low_bits, 8);
    whole_high_offset = whole_offset + size_t{low_rows} * kPanelColumns;
    scale_rows = low_rows + ceil_div(groups * whole_high_bits, 8);
  } else if (is_grid(format.code)) {
    scale_rows = 0;  // in the codes
  }
  const size_t section_bytes = whole_offset + align64(scale_rows * scale_columns);
  signs_offset = scales_offset + section_bytes;
  const size_t signs_of_64 = 2 * sign_bytes(format.code) + (format.code == Code::kTq1 ? 1 : 0);
  zeros_offset = signs_offset + align64(size_t{k_padded} / 64 * kPanelColumns * signs_of_64);
  mins_offset = zeros_offset + (format.zeros ? align64(size_t{groups} * kPanelColumns) : 0);
  column_scale_offset = mins_offset + (!format.mins ? 0 : joined ? whole_offset : section_bytes);
  bias_offset = column_scale_offset + (format.column_scale ? kPanelColumns * sizeof(float) : 0);
  panel_bytes = bias_offset + (has_bias ? kPanelColumns * sizeof(float) : 0);
}

ExpertLayout::ExpertLayout(const GateUpFormats& formats, const WeightFormat& down_format, uint32_t hidden,
                           uint32_t intermediate, bool with_gate, bool has_bias)
    : mixed(formats.gate != formats.up), hidden_size(hidden), intermediate_size(intermediate), gated(with_gate) {
  check_size("hidden_size", hidden);
  check_size("intermediate_size", intermediate);
  if (down_format.ordered) throw std::invalid_argument("the format of down is ordered; allowed for gate and up only");
  if (mixed) check_mixed(formats, gated);
  gate = PanelLayout(formats.gate, hidden, has_bias);
  gate_up = PanelLayout(formats.up, hidden, has_bias);
  down = PanelLayout(down_format, intermediate, has_bias);
  panels_per_column_block = gated ? 2 : 1;
  intermediate_blocks = ceil_div(intermediate, kPanelColumns);
  down_panels = ceil_div(hidden, kPanelColumns);
  gate_step = mixed ? gate.panel_bytes : panels_per_column_block * gate.panel_bytes;
  up_step = mixed ? gate_up.panel_bytes : gate_step;
  up_offset = mixed ? intermediate_blocks * gate_step : gate_step - gate_up.panel_bytes;
  down_offset = mixed ? up_offset + intermediate_blocks * up_step : intermediate_blocks * gate_step;
  order_offset = down_offset + down_panels * down.panel_bytes;
  expert_bytes = order_offset + (formats.up.ordered ? align64(size_t{hidden} * sizeof(uint32_t)) : 0);
}

}  // namespace moebius
