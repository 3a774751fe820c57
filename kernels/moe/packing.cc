#include "kernels/moe/packing.h"

#include <algorithm>
#include <vector>

#include "kernels/moe/bfloat16.h"

namespace moebius {
namespace {

uint32_t ceil_div(uint32_t value, uint32_t divisor) { return (value + divisor - 1) / divisor; }
size_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? sizeof(float) : sizeof(uint16_t); }

float as_float(float value) { return value; }
float as_float(uint16_t bits) { return bfloat16_to_float(bits); }
uint16_t as_bfloat16(float value) { return float_to_bfloat16(value); }
uint16_t as_bfloat16(uint16_t bits) { return bits; }

// Source rows are read a cache line at a time: their distance is often a multiple of 4 KiB, and reading one
// element of each in turn would make them evict one another.
constexpr uint32_t kBlock = 32;

// One panel; low and high are `lanes` source rows each, null for padding. The target is zero, as mapped.
template <class Source>
void pack_panel(const Source* const* low, const Source* const* high, uint32_t k, uint32_t lanes, float* target) {
  for (uint32_t begin = 0; begin < k; begin += kBlock) {
    const uint32_t end = std::min(begin + kBlock, k);
    for (uint32_t lane = 0; lane < 2 * lanes; ++lane) {
      const Source* row = lane < lanes ? low[lane] : high[lane - lanes];
      if (row == nullptr) continue;
      for (uint32_t i = begin; i < end; ++i) target[size_t{2} * lanes * i + lane] = as_float(row[i]);
    }
  }
}

template <class Source>
void pack_panel(const Source* const* low, const Source* const* high, uint32_t k, uint32_t lanes, uint32_t* target) {
  for (uint32_t begin = 0; begin < k; begin += kBlock) {
    const uint32_t end = std::min(begin + kBlock, k);
    for (uint32_t lane = 0; lane < 2 * lanes; ++lane) {
      const Source* row = lane < lanes ? low[lane] : high[lane - lanes];
      if (row == nullptr) continue;
      const uint32_t shift = lane < lanes ? 0 : 16;
      uint32_t* column = target + lane % lanes;
      for (uint32_t i = begin; i < end; ++i) column[size_t{lanes} * i] |= uint32_t{as_bfloat16(row[i])} << shift;
    }
  }
}

// Panels whose low columns are rows first_low.. of `low` and whose high columns are rows of `high`; both
// advance by `step` rows a panel. Rows at or beyond num_rows are padding.
template <class Source, class Target>
void pack_matrix(const Source* low, const Source* high, uint32_t high_begin, uint32_t step, uint32_t num_rows,
                 uint32_t k, uint32_t lanes, uint32_t panels, Target* target, size_t panel_bytes) {
  std::vector<const Source*> low_rows(lanes);
  std::vector<const Source*> high_rows(lanes);
  for (uint32_t panel = 0; panel < panels; ++panel) {
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      const size_t low_row = static_cast<size_t>(panel) * step + lane;
      const size_t high_row = low_row + high_begin;
      low_rows[lane] = low_row < num_rows ? low + low_row * k : nullptr;
      high_rows[lane] = high_row < num_rows ? high + high_row * k : nullptr;
    }
    pack_panel(low_rows.data(), high_rows.data(), k, lanes, target + panel * (panel_bytes / sizeof(Target)));
  }
}

template <class Source, class Target>
void pack(const PackedShape& shape, const ExpertWeights& weights, std::byte* target) {
  const auto* down = static_cast<const Source*>(weights.down);
  pack_matrix(static_cast<const Source*>(weights.gate), static_cast<const Source*>(weights.up), 0, shape.lanes,
              shape.intermediate_size, shape.hidden_size, shape.lanes, shape.gate_up_panels,
              reinterpret_cast<Target*>(target), shape.gate_up_panel_bytes);
  pack_matrix(down, down, shape.lanes, 2 * shape.lanes, shape.hidden_size, shape.intermediate_size, shape.lanes,
              shape.down_panels, reinterpret_cast<Target*>(target + shape.down_offset), shape.down_panel_bytes);
}

}  // namespace

PackedShape::PackedShape(uint32_t hidden, uint32_t intermediate, uint32_t vector_lanes, DType at_rest)
    : hidden_size(hidden),
      intermediate_size(intermediate),
      lanes(vector_lanes),
      dtype(at_rest),
      gate_up_panels(ceil_div(intermediate, vector_lanes)),
      down_panels(ceil_div(hidden, 2 * vector_lanes)),
      gate_up_panel_bytes(size_t{2} * vector_lanes * hidden * element_bytes(at_rest)),
      down_panel_bytes(size_t{2} * vector_lanes * intermediate * element_bytes(at_rest)),
      down_offset(gate_up_panels * gate_up_panel_bytes),
      expert_bytes((down_offset + down_panels * down_panel_bytes + 63) / 64 * 64) {}

void pack_expert(const PackedShape& shape, const ExpertWeights& weights, void* target) {
  auto* bytes = static_cast<std::byte*>(target);
  const bool from_float = weights.dtype == DType::kFloat32;
  if (shape.dtype == DType::kFloat32) {
    from_float ? pack<float, float>(shape, weights, bytes) : pack<uint16_t, float>(shape, weights, bytes);
  } else {
    from_float ? pack<float, uint32_t>(shape, weights, bytes) : pack<uint16_t, uint32_t>(shape, weights, bytes);
  }
}

}  // namespace moebius
