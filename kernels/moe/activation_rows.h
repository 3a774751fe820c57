// The activation between the two phases: one row for each (row, expert) pair, as the pair's down product reads it.
// Phase A writes it in float32 or bfloat16. Rows for int8 GEMMs are then quantised, and others prepared where their
// kernel asks for it: once a call, by the thread that wrote the last of an expert's columns, or in tasks of their own
// where an expert has many rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/moe/layer_call.h"
#include "kernels/moe/row_buffer.h"

namespace moebius {

class ActivationRows {
 public:
  // Rows of a group for phase B.
  struct Rows {
    const void* const* rows;
    size_t stride;        // bytes between rows that are equally spaced; 0: they were prepared
    const float* scales;  // int8 rows
  };

  explicit ActivationRows(const VectorKernels& vectors) : vectors_(vectors) {}

  // Before phase A of a call.
  void plan(const LayerCall& call);

  // Phase A: activates results (as the GEMM wrote them) of `num_rows` rows from `pair` on, `num_blocks` column
  // blocks from `block` on.
  void store(const ActivationWork& results, RowType down_rows, uint32_t pair, uint32_t block) const;

  // Phase A, after every row of `num_blocks` column blocks of a group is stored. The last call of a group quantises or
  // prepares its rows, if they are few.
  void stored(const LayerCall& call, uint32_t group, uint32_t num_blocks);

  // Between the phases: the rows of groups that have many.
  uint32_t num_tasks() const { return static_cast<uint32_t>(tasks_.size()); }
  void run_task(const LayerCall& call, uint32_t task);

  // Phase B.
  Rows of_group(const LayerCall& call, uint32_t group) const;

 private:
  struct PairRange {
    uint32_t group;
    uint32_t begin;
    uint32_t end;
  };

  void plan_group(const LayerCall& call, uint32_t group);
  void finish(const LayerCall& call, const PairRange& pairs);

  const VectorKernels& vectors_;
  uint32_t intermediate_size_ = 0;
  RowBuffer floats_;       // [pairs]
  RowBuffer halves_;       // [pairs]
  RowBuffer quantised_;    // [pairs]
  std::vector<float> scales_;               // [pairs], of quantised_
  AlignedBuffer prepared_;                  // rows of any size
  size_t prepared_stride_ = 0;
  std::vector<const void*> prepared_rows_;  // [pairs]
  // [groups] Column blocks that are not stored yet; the rows of groups with none from the beginning need no more.
  std::vector<std::atomic<uint32_t>> blocks_left_;
  std::vector<PairRange> tasks_;
};

}  // namespace moebius
