// From the row-major matrices of a checkpoint to the panels of kernel_table.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/moe/expert_backend.h"

namespace moebius {

// One expert's matrices, row-major and contiguous, all of one type. Owned by the caller.
struct ExpertWeights {
  DType dtype;
  const void* gate;  // [intermediate, hidden]
  const void* up;    // [intermediate, hidden]
  const void* down;  // [hidden, intermediate]
};

// Where things lie inside one packed expert: all gate/up panels, then all down panels.
struct PackedShape {
  PackedShape(uint32_t hidden_size, uint32_t intermediate_size, uint32_t lanes, DType dtype);

  uint32_t hidden_size;
  uint32_t intermediate_size;
  uint32_t lanes;
  DType dtype;               // at rest
  uint32_t gate_up_panels;   // lanes intermediate columns each
  uint32_t down_panels;      // 2 * lanes hidden columns each
  size_t gate_up_panel_bytes;
  size_t down_panel_bytes;
  size_t down_offset;        // bytes from the expert's begin
  size_t expert_bytes;       // a multiple of 64
};

// Packs one expert into `target` (shape.expert_bytes, zeroed), converting the type where it differs.
void pack_expert(const PackedShape& shape, const ExpertWeights& weights, void* target);

}  // namespace moebius
