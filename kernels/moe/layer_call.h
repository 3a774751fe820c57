// The data that the phases of one forward call share, and the scratch of its threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/panel_layout.h"
#include "kernels/gemm/gemm.h"
#include "kernels/moe/expert_backend.h"
#include "kernels/moe/row_buffer.h"
#include "kernels/moe/row_groups.h"

namespace moebius {

// The kernels and weights of one group of rows.
struct GroupWork {
  const GemmKernel* gate_up;
  const GemmKernel* down;
  const std::byte* expert;  // packed
  const GemmKernel* gate = nullptr;  // where gate has a format of its own: takes rows as `gate_up` does
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
  AlignedBuffer result;  // of a GEMM
  AlignedBuffer gemm;    // what the GEMM asks for
  AlignedBuffer sums;    // of a task's output columns over all experts
  const std::byte* fetched = nullptr;  // panels that the thread's last GEMM has asked for
};

// Bytes of an element of prepared rows.
inline size_t element_bytes(RowType type) {
  return type == RowType::kFloat32 ? 4 : type == RowType::kBFloat16 ? 2 : 1;
}

}  // namespace moebius
