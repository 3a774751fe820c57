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

class RowCache {
 public:
  // In calls of more rows they are prepared again for every GEMM: keeping them would cost more than it saves.
  static constexpr uint32_t kMostRows = 256;

  // Where `kernel` prepares rows, gives `work` what it reads instead of them. Row i of the work is number id_of(i) among
  // the `total` of call number `call`. Valid until this function is called again.
  template <class IdOf>
  void prepare(const GemmKernel& kernel, uint32_t total, uint64_t call, IdOf&& id_of, GemmWork& work) {
    if (kernel.prepare_row == nullptr) return;
    const size_t stride = row_stride(kernel.prepared_row_bytes(*work.layout));
    const bool keeps = total <= kMostRows;
    pointers_.resize(work.num_rows);
    kept_.resize(kMostRows);
    buffer_.grow((keeps ? total : work.num_rows) * stride);
    for (uint32_t i = 0; i < work.num_rows; ++i) {
      const uint32_t place = keeps ? id_of(i) : i;
      std::byte* const target = buffer_.data() + place * stride;
      pointers_[i] = target;
      const Kept wanted{call, &kernel};
      if (keeps && kept_[place] == wanted) continue;
      kernel.prepare_row(*work.layout, work.rows[i], target);
      if (keeps) kept_[place] = wanted;
    }
    work.rows = pointers_.data();
    work.row_stride = 0;
  }

 private:
  // What a place of the buffer was prepared for.
  struct Kept {
    uint64_t call = 0;
    const GemmKernel* kernel = nullptr;

    bool operator==(const Kept&) const = default;
  };

  AlignedBuffer buffer_;
  std::vector<Kept> kept_;
  std::vector<const void*> pointers_;
};

// --- What the phases of one forward call share.

// The kernels and weights of one group of rows.
struct GroupWork {
  const GemmKernel* gate_up;
  const GemmKernel* down;
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
  AlignedBuffer result;   // of a GEMM
  AlignedBuffer gemm;     // what the GEMM asks for
  AlignedBuffer sums;     // of a task's output columns over all experts
  RowCache gate_up_rows;  // of the request
  RowCache down_rows;     // of the activation
};

// Bytes of an element of prepared rows.
inline size_t element_bytes(RowType type) {
  return type == RowType::kFloat32 ? 4 : type == RowType::kBFloat16 ? 2 : 1;
}

}  // namespace moebius
