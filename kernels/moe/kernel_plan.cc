#include "kernels/moe/kernel_plan.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/product/registry.h"

namespace moebius {
namespace {

std::vector<const ProductKernel*> find_candidates(const PlanOptions& options, const WeightFormat& format,
                                                  RequestKind request) {
  if (format.quantised_rows) return find_products(options.isa, format, RowType::kInt8, options.exact_level);
  std::vector<const ProductKernel*> found;
  if (request == RequestKind::kBFloat16) {
    found = find_products(options.isa, format, RowType::kBFloat16, options.exact_level);
    if (options.exact_level && !found.empty()) return found;
  }
  const auto wide = find_products(options.isa, format, RowType::kFloat32, true);
  found.insert(found.end(), wide.begin(), wide.end());
  return found;
}

bool can_compute(const ProductKernel& kernel, const WeightFormat& format, RequestKind request) {
  if (!kernel.supports(format)) return false;
  if (format.quantised_rows) return kernel.row_type == RowType::kInt8;
  if (kernel.row_type == RowType::kBFloat16) return request == RequestKind::kBFloat16;
  return kernel.row_type == RowType::kFloat32;
}

bool does_rows(const ProductKernel& kernel, uint32_t rows) { return kernel.max_rows == 0 || rows <= kernel.max_rows; }

}  // namespace

MatrixPlan::MatrixPlan(const PlanOptions& options, const WeightFormat& format, RequestKind request)
    : format_(format), request_(request), forced_(nullptr), candidates_(find_candidates(options, format, request)) {
  if (candidates_.empty()) {
    throw std::invalid_argument("weight format '" + weight_format_name(format) + "' has no kernel at level " +
                                isa_name(options.isa));
  }
  if (options.forced != nullptr && can_compute(*options.forced, format, request)) forced_ = options.forced;
  for (size_t range = 0; range < kRowRanges.size(); ++range) choices_[range] = {candidates(range).front(), 0.0};
}

const ProductKernel& MatrixPlan::kernel(uint32_t rows) const {
  if (forced_ != nullptr && does_rows(*forced_, rows)) return *forced_;
  const auto behind = std::upper_bound(kRowRanges.begin(), kRowRanges.end(), rows);
  return *choices_[static_cast<size_t>(behind - kRowRanges.begin()) - 1].kernel;
}

std::vector<const ProductKernel*> MatrixPlan::candidates(size_t range) const {
  const uint32_t last = rows_to(range);
  if (forced_ != nullptr && does_rows(*forced_, last)) return {forced_};
  std::vector<const ProductKernel*> found;
  for (const ProductKernel* kernel : candidates_) {
    if (does_rows(*kernel, last)) found.push_back(kernel);
  }
  if (found.empty()) found.push_back(candidates_.back());
  // Which float32-row kernel computes float32 requests must not depend on timing.
  const bool exact = request_ == RequestKind::kFloat32 && found.front()->row_type == RowType::kFloat32;
  if (exact) found.resize(1);
  return found;
}

KernelPlan::KernelPlan(const std::vector<ExpertLayout>& layouts, const PlanOptions& options) {
  bool fits = options.forced == nullptr;
  for (const ExpertLayout& layout : layouts) {
    for (const WeightFormat& format : {layout.gate_up.format, layout.down.format}) {
      for (const RequestKind request : {RequestKind::kFloat32, RequestKind::kBFloat16}) {
        plans_.emplace_back(options, format, request);
        fits = fits || can_compute(*options.forced, format, request);
      }
    }
  }
  if (!fits) {
    throw std::invalid_argument(std::string("kernel '") + options.forced->name +
                                "' computes none of the engine's weight formats");
  }
}

}  // namespace moebius
