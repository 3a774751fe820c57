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
    const uint32_t count = blocks_end - begin;
    if (layout.gated) {
      add(sum, pack_named("gate", source.gate, layout.gate, {begin, count, layout.gate_step},
                          target + begin * layout.gate_step));
    }
    add(sum, pack_named("up", source.up, layout.gate_up, {begin, count, layout.up_step},
                        target + layout.up_offset + begin * layout.up_step));
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
