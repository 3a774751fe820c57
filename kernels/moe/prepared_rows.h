// The rows of a request as the gate and up GEMMs want them: converted, padded, equally spaced or prepared by the
// kernel itself where it asks for that. Rows that are as wanted already are used where they lie. Where the packed
// experts have an order (panel_layout.h), every (row, expert) pair gets a copy of its row in that order.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/moe/layer_call.h"
#include "kernels/moe/row_buffer.h"

namespace moebius {

// One call at a time: plan(), then every task, then rows may be read.
class PreparedRows {
 public:
  struct Rows {
    const void* const* rows;
    size_t stride;        // see GemmWork; 0 of rows that their kernel prepared
    const float* scales;  // int8 rows
  };

  explicit PreparedRows(const VectorKernels& vectors) : vectors_(vectors) {}

  // Decides what is to be done. Little copying is done at once, and no tasks are left: a few microseconds of one
  // thread are cheaper than a barrier.
  void plan(const LayerCall& call);
  uint32_t num_tasks() const { return num_tasks_; }
  void run_task(uint32_t task, const ExpertRequest& request, const RowGroups& groups);
  // After those: each expert's rows in its own order, where the layout has one.
  uint32_t num_order_tasks() const { return num_order_tasks_; }
  void run_order_task(uint32_t task, const LayerCall& call);

  // Returns a group's rows, once all tasks are done.
  Rows of_group(uint32_t group, const RowGroups& groups) const;

 private:
  enum class Need : uint8_t { kNone, kInPlace, kConvert };
  static constexpr uint8_t kNotPrepared = UINT8_MAX;

  // Rows, or with an order pairs, as one kernel prepares them.
  struct Preparation {
    const GemmKernel* kernel;
    size_t stride;
    AlignedBuffer rows;

    std::byte* row(size_t i) const { return rows.data() + i * stride; }
  };

  void find_needs(const LayerCall& call);
  void find_preparations(const LayerCall& call);
  uint8_t preparation_of(const GemmKernel& kernel) const;
  size_t plan_group(const LayerCall& call, uint32_t group);
  void plan_order(const LayerCall& call);
  void order_pair(const LayerCall& call, uint32_t pair) const;
  void run_row(uint32_t row, const ExpertRequest& request, const RowGroups& groups);
  void finish_pairs(uint32_t row, const ExpertRequest& request, const RowGroups& groups, float scale);
  float* convert_row(uint32_t row, const ExpertRequest& request);
  const std::byte* row_source(RowType type, uint32_t row) const;
  size_t source_stride(RowType type) const;

  const VectorKernels& vectors_;
  const PanelLayout* layout_ = nullptr;
  uint32_t hidden_size_ = 0;
  Need needs_[3] = {};               // by RowType
  const std::byte* in_place_ = nullptr;
  size_t in_place_stride_ = 0;
  uint32_t num_tasks_ = 0;
  uint32_t rows_per_task_ = 1;
  uint32_t num_order_tasks_ = 0;
  uint32_t pairs_per_task_ = 1;
  RowBuffer rows_[3];                // [rows] by RowType
  RowBuffer gathered_[3];            // [pairs] by RowType
  std::vector<Preparation> preparations_;  // the first num_preparations_ are in use
  size_t num_preparations_ = 0;
  std::vector<const void*> pointers_;  // [pairs]
  std::vector<uint8_t> pair_preparations_;  // [pairs] index of a preparation, or kNotPrepared
  std::vector<uint8_t> is_gathered_;   // [pairs]
  std::vector<uint32_t> pair_groups_;  // [pairs], with an order
  std::vector<RowType> pair_types_;    // [pairs]
  std::vector<float> pair_scales_;     // [pairs], int8 rows
  std::vector<size_t> strides_;        // [groups]
};

}  // namespace moebius
