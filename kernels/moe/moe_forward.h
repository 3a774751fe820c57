// One MoE layer over packed experts, in two parallel phases:
//   A  task = (expert, some gate/up panels): activation = silu(x gate^T) * (x up^T), float32
//   B  task = (some output columns, all experts): output += router weight * (activation down^T)
// Every weight is read once a call however many rows chose it. Tasks own what they write, so nothing is
// reduced across threads, and a row's sum runs over its experts in ascending order whatever the batch, the
// number of threads or the cut into tasks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/moe/expert_backend.h"
#include "kernels/moe/expert_store.h"
#include "kernels/moe/kernel_table.h"
#include "kernels/moe/row_groups.h"
#include "kernels/pool/thread_pool.h"

namespace moebius {

// Not thread safe: the scratch below belongs to one call at a time.
class MoeForward {
 public:
  MoeForward(const KernelTable& kernels, const ExpertStore& store, ThreadPool& pool);

  // Computes `groups` (all of whose experts are loaded in request.layer) into output [rows, hidden],
  // overwritten. Returns how many outputs are NaN or infinite.
  uint64_t run(const ExpertRequest& request, const RowGroups& groups, float* output);

 private:
  struct GateUpTask {
    uint32_t group;
    uint32_t panel;
    uint32_t num_panels;
  };

  const float* rows_as_float(const ExpertRequest& request);
  void prepare(const ExpertRequest& request, const RowGroups& groups);
  void plan_gate_up(const RowGroups& groups);
  uint32_t down_panels_per_task() const;
  void run_gate_up(const GateUpTask& task, const ExpertRequest& request, const RowGroups& groups);
  uint64_t run_down(uint32_t first_panel, uint32_t num_panels, const ExpertRequest& request, const RowGroups& groups,
                    float* output) const;

  const KernelTable& kernels_;
  const ExpertStore& store_;
  ThreadPool& pool_;
  const PackedShape& shape_;
  size_t activation_stride_;

  // Scratch, grown to the largest call so far.
  std::vector<float> converted_rows_;       // [rows, hidden], only for bfloat16 requests
  std::vector<const float*> row_pointers_;  // [pairs]
  std::vector<float> activation_;           // [pairs, activation_stride_]
  std::vector<GateUpTask> gate_up_tasks_;
};

}  // namespace moebius
