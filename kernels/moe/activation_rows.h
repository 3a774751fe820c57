// The activation between the two phases: one row for each (row, expert) pair, in the type that the pair's down
// product reads. Phase A writes it in float32 or bfloat16; for int8 GEMMs the float32 rows are quantised
// before phase B: by each thread for itself when there are few, in tasks of their own when there are many.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/moe/layer_call.h"
#include "kernels/moe/row_buffer.h"

namespace moebius {

class ActivationRows {
 public:
  // Rows of a group for phase B, all equally spaced.
  struct Rows {
    const void* const* rows;
    size_t stride;        // bytes
    const float* scales;  // int8 rows
  };

  ActivationRows(const VectorKernels& vectors, uint32_t num_workers) : vectors_(vectors), own_(num_workers) {}

  // Before phase A of a call.
  void plan(const LayerCall& call);

  // Phase A: activates results (as the GEMM wrote them) of `num_rows` rows from `pair` on, `num_blocks` column
  // blocks from `block` on.
  void store(const ActivationWork& results, RowType down_rows, uint32_t pair, uint32_t block) const;

  // Between the phases, when rows are quantised in common.
  uint32_t num_tasks() const { return num_tasks_; }
  void run_task(uint32_t task);

  // Phase B, on thread `worker`.
  Rows of_group(const RowGroups::Group& group, RowType type, uint32_t worker);

 private:
  struct Quantised {
    RowBuffer rows;             // [pairs]
    std::vector<float> scales;  // [pairs]
    uint64_t call = 0;          // that they belong to
  };

  void quantise(Quantised& target, uint32_t begin, uint32_t end) const;

  const VectorKernels& vectors_;
  uint32_t intermediate_size_ = 0;
  uint32_t num_pairs_ = 0;
  uint64_t call_ = 0;
  bool is_common_ = false;  // quantised rows are in common_, else in own_
  uint32_t num_tasks_ = 0;
  RowBuffer floats_;        // [pairs]
  RowBuffer halves_;        // [pairs]
  Quantised common_;
  std::vector<Quantised> own_;  // [workers]
  size_t quantised_row_bytes_ = 0;
};

}  // namespace moebius
