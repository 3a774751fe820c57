// One MoE layer over packed experts, in two parallel phases:
//   A  task = (expert, some column blocks): activation(x gate^T, x up^T), in the type that the down GEMM reads
//   B  task = (some output panels, all experts): output += router weight * (activation down^T)
// Every weight is read once a call however many rows chose it. Tasks own what they write, so nothing is
// reduced across threads, and a row's sum runs over its experts in ascending order whatever the batch, the
// number of threads or the cut into tasks.
//
// A thread that waits for a phase to begin prefetches weights for its first task of it: they depend on nothing.
//
// Rows that a kernel prepares, and many that have to be converted, gathered or quantised, are so in a parallel phase
// before A, once a call. Activations are quantised or prepared by the thread that finishes an expert, or in a phase
// between A and B where one has many.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/moe/activation_rows.h"
#include "kernels/moe/engine_options.h"
#include "kernels/moe/expert_store.h"
#include "kernels/moe/kernel_plan.h"
#include "kernels/moe/layer_call.h"
#include "kernels/moe/prepared_rows.h"
#include "kernels/moe/task_trace.h"
#include "kernels/pool/thread_pool.h"

namespace moebius {

// Values that were NaN or infinite in one call.
struct NonfiniteCounts {
  uint64_t inputs = 0;
  uint64_t outputs = 0;
};

// Not thread safe: the scratch below belongs to one call at a time.
class MoeForward {
 public:
  MoeForward(const EngineOptions& options, const VectorKernels& vectors, const ExpertStore& store,
             const KernelPlan& plan, ThreadPool& pool);

  // Computes `groups` (all of whose experts are loaded in request.layer) into output [rows, hidden],
  // overwritten, or added to with `adds`: sums over ascending experts are the same in one run and in several. What is
  // still read from a disk is computed last. request.rows > 0. Tasks are noted in `trace` unless it is null.
  NonfiniteCounts run(const ExpertRequest& request, const RowGroups& groups, float* output, TaskTrace* trace,
                      bool adds = false);

 private:
  // Of a run of the pool.
  static constexpr uint32_t kGateUpPhase = 2;
  static constexpr uint32_t kDownPhase = 4;

  struct GateUpTask {
    uint32_t group;
    uint32_t block;
    uint32_t num_blocks;
  };
  struct DownTask {
    uint32_t panel;
    uint32_t num_panels;
  };

  void choose_kernels(const ExpertRequest& request, const RowGroups& groups);
  void cut_gate_up(const LayerCall& call);
  void cut_down(const LayerCall& call);
  // The first panel that the task reads.
  const std::byte* gate_up_panels(const GateUpTask& task, const LayerCall& call) const;
  const std::byte* down_panels(const DownTask& task, const LayerCall& call, uint32_t group) const;
  // What a task reads first; null where it is no task of phase A or B.
  const std::byte* panels_of(const NextTask& next, const LayerCall& call) const;
  // next: what the thread reads after the task, null if that is not known.
  void run_gate_up(const GateUpTask& task, const LayerCall& call, uint32_t worker, const std::byte* next);
  // Ask for the first weights of a task, until opened().
  template <class Opened>
  void prefetch_gate_up(const GateUpTask& task, const LayerCall& call, const Opened& opened) const;
  template <class Opened>
  void prefetch_down(const DownTask& task, const LayerCall& call, const Opened& opened) const;
  void run_down(const DownTask& task, const LayerCall& call, float* output, uint32_t worker, const std::byte* next);
  // sums: [rows][16 * task.num_panels].
  void add_group(const DownTask& task, const LayerCall& call, uint32_t group, float* sums, uint32_t worker,
                 const std::byte* next);
  void count_nonfinite(const DownTask& task, const LayerCall& call, const float* sums);
  static void choose_gate(const MatrixPlan& gate, const MatrixPlan& up, uint32_t rows, GroupWork& work);
  void multiply(const GemmKernel& kernel, GemmWork& work, uint32_t worker);
  void multiply_into(const GemmKernel& kernel, GemmWork& work, uint32_t worker, size_t width, size_t column);
  void multiply_apart(const GroupWork& weights, const GateUpTask& task, const ExpertLayout& layout, GemmWork& work,
                      uint32_t worker);

  const EngineOptions& options_;
  const VectorKernels& vectors_;
  const ExpertStore& store_;
  const KernelPlan& plan_;
  ThreadPool& pool_;
  PreparedRows rows_;
  ActivationRows activation_;
  std::vector<WorkerScratch> scratch_;  // [workers]
  std::vector<GroupWork> work_;         // [groups]
  std::vector<uint32_t> order_;         // groups, most rows first
  std::vector<GateUpTask> gate_up_tasks_;
  std::vector<DownTask> down_tasks_;
  bool adds_ = false;
  std::atomic<uint64_t> nonfinite_inputs_{0};
  std::atomic<uint64_t> nonfinite_outputs_{0};
};

}  // namespace moebius
