#include "kernels/dense/dense_threads.h"

#include "kernels/gemm/registry.h"

namespace moebius::dense {
namespace {

PlanOptions plan_options(const std::string& isa) {
  const Isa level = resolve_isa(isa);
  return {level, isa != "auto" || level != supported_isas().back(), nullptr};
}

const RowKernels& row_kernels_of(Isa isa) {
  if (isa >= Isa::kAvx512) return row_kernels_avx512();
  return isa == Isa::kAvx2 ? row_kernels_avx2() : row_kernels_scalar();
}

}  // namespace

LayoutPlan::LayoutPlan(const PlanOptions& options, const PanelLayout& panel_layout)
    : layout(panel_layout),
      float32(options, panel_layout.format, RequestKind::kFloat32),
      bfloat16(options, panel_layout.format, RequestKind::kBFloat16) {}

DenseThreads::DenseThreads(uint32_t num_threads, const std::string& isa)
    : options_(plan_options(isa)),
      vectors_(vector_kernels(options_.isa)),
      row_kernels_(row_kernels_of(options_.isa)),
      pool_(num_threads, {}),
      scratch_(pool_.size()) {}

LayoutPlan& DenseThreads::plan(const WeightFormat& format, uint32_t k) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (LayoutPlan& plan : plans_) {
    if (plan.layout.format == format && plan.layout.k == k) return plan;
  }
  return plans_.emplace_back(options_, PanelLayout(format, k, false));
}

void DenseThreads::calibrate(LayoutPlan& plan, const std::byte* panels, uint32_t num_panels) {
  // Weights in bfloat16 have one kernel for its rows below AMX, and one that widens them and is never faster.
  if (plan.layout.format.code == Code::kBFloat16 && options_.isa < Isa::kAmx) return;
  const std::lock_guard<std::mutex> lock(call_mutex_);
  if (plan.calibrated) return;
  plan.calibrated = true;
  calibrate_matrix(plan.bfloat16, plan.layout, panels, num_panels, pool_);
}

}  // namespace moebius::dense
