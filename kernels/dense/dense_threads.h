// What all dense layers of one model share: threads, the instruction set, scratch, kernel plans.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/dense/row_kernels.h"
#include "kernels/format/panel_layout.h"
#include "kernels/gemm/gemm.h"
#include "kernels/isa/isa.h"
#include "kernels/moe/kernel_plan.h"
#include "kernels/moe/row_buffer.h"
#include "kernels/pool/thread_pool.h"

namespace moebius::dense {

// Matrices of one packed format and width, and the kernels that multiply rows with them.
struct LayoutPlan {
  LayoutPlan(const PlanOptions& options, const PanelLayout& panel_layout);

  PanelLayout layout;
  MatrixPlan float32;   // of requests in float32
  MatrixPlan bfloat16;  // of requests in bfloat16
  bool calibrated = false;
};

// Scratch of one thread while a call runs.
struct Scratch {
  AlignedBuffer result;  // of a GEMM
  AlignedBuffer gemm;    // what the GEMM asks for
};

class DenseThreads {
 public:
  // num_threads 0: one per usable CPU. isa: see resolve_isa. Throws std::invalid_argument naming what is not allowed.
  DenseThreads(uint32_t num_threads, const std::string& isa);
  DenseThreads(const DenseThreads&) = delete;
  DenseThreads& operator=(const DenseThreads&) = delete;

  ThreadPool& pool() { return pool_; }
  const VectorKernels& vectors() const { return vectors_; }
  const RowKernels& row_kernels() const { return row_kernels_; }
  Isa isa() const { return options_.isa; }
  Scratch& scratch(uint32_t worker) { return scratch_[worker]; }
  // What phases of one call hand on.
  AlignedBuffer& shared() { return shared_; }
  // Held by a call of any layer while it uses scratch.
  std::mutex& call_mutex() { return call_mutex_; }

  // Returns the plan of a layout without bias, the same one for equal layouts. Throws std::invalid_argument when no
  // kernel computes the format.
  LayoutPlan& plan(const WeightFormat& format, uint32_t k);
  // Measures the kernels of a plan on a packed matrix where bfloat16 rows have a choice, once for each plan.
  void calibrate(LayoutPlan& plan, const std::byte* panels, uint32_t num_panels);

 private:
  PlanOptions options_;
  const VectorKernels& vectors_;
  const RowKernels& row_kernels_;
  ThreadPool pool_;
  std::vector<Scratch> scratch_;  // [workers]
  AlignedBuffer shared_;
  std::mutex call_mutex_;
  std::deque<LayoutPlan> plans_;  // grows in place, under mutex_
  std::mutex mutex_;
};

}  // namespace moebius::dense
