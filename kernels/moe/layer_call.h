// What the phases of one forward call share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/panel_layout.h"
#include "kernels/moe/aligned_buffer.h"
#include "kernels/moe/expert_backend.h"
#include "kernels/moe/row_cache.h"
#include "kernels/moe/row_groups.h"
#include "kernels/product/product.h"

namespace moebius {

// The kernels and weights of one group of rows.
struct GroupWork {
  const ProductKernel* gate_up;
  const ProductKernel* down;
  const std::byte* expert;  // packed
};

// Filled by MoeForward; constant while the phases run.
struct LayerCall {
  const ExpertRequest& request;
  const RowGroups& groups;
  const ExpertLayout& layout;
  const std::vector<GroupWork>& work;  // [groups]
};

// Scratch of one thread of the pool.
struct WorkerScratch {
  AlignedBuffer result;   // of a product
  AlignedBuffer product;  // what the product asks for
  AlignedBuffer sums;     // of a task's output columns over all experts
  RowCache gate_up_rows;  // of the request
  RowCache down_rows;     // of the activation
};

// Bytes of an element of prepared rows.
inline size_t element_bytes(RowType type) {
  return type == RowType::kFloat32 ? 4 : type == RowType::kBFloat16 ? 2 : 1;
}

}  // namespace moebius
