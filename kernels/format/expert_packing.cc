#include "kernels/format/expert_packing.h"

#include <stdexcept>
#include <string>

#include "kernels/format/pack.h"

namespace moebius {
namespace {

void check_shape(const char* name, const SourceMatrix& source, uint32_t rows, uint32_t cols) {
  if (source.rows == rows && source.cols == cols) return;
  throw std::invalid_argument(std::string(name) + " has shape [" + std::to_string(source.rows) + ", " +
                              std::to_string(source.cols) + "]; it must be [" + std::to_string(rows) + ", " +
                              std::to_string(cols) + "]");
}

PackError pack_matrix(const SourceMatrix& source, const PanelLayout& layout, uint32_t panels, size_t stride,
                      std::byte* target) {
  PackError sum;
  const bool exact = packs_exactly(source, layout.format);
  for (uint32_t panel = 0; panel < panels; ++panel, target += stride) {
    if (exact) {
      pack_panel(source, layout, panel, target);
      continue;
    }
    const PackError error = requantise_panel(source, layout, panel, target);
    sum.squared_error += error.squared_error;
    sum.squared_reference += error.squared_reference;
  }
  return sum;
}

}  // namespace

PackError pack_expert(const ExpertLayout& layout, const ExpertSource& source, std::byte* target) {
  if (layout.gated) check_shape("gate", source.gate, layout.intermediate_size, layout.hidden_size);
  check_shape("up", source.up, layout.intermediate_size, layout.hidden_size);
  check_shape("down", source.down, layout.hidden_size, layout.intermediate_size);
  PackError sum;
  auto add = [&](const PackError& error) {
    sum.squared_error += error.squared_error;
    sum.squared_reference += error.squared_reference;
  };
  const size_t stride = layout.panels_per_column_block * layout.gate_up.panel_bytes;
  std::byte* up = target;
  if (layout.gated) {
    add(pack_matrix(source.gate, layout.gate_up, layout.intermediate_blocks, stride, target));
    up += layout.gate_up.panel_bytes;
  }
  add(pack_matrix(source.up, layout.gate_up, layout.intermediate_blocks, stride, up));
  add(pack_matrix(source.down, layout.down, layout.down_panels, layout.down.panel_bytes,
                  target + layout.down_offset));
  return sum;
}

}  // namespace moebius
