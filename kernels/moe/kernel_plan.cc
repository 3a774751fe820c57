#include "kernels/moe/kernel_plan.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>

#include "kernels/gemm/registry.h"
#include "kernels/moe/layer_call.h"
#include "kernels/moe/row_buffer.h"
#include "kernels/pool/thread_pool.h"

namespace moebius {
namespace {

std::vector<const GemmKernel*> find_candidates(const PlanOptions& options, const WeightFormat& format,
                                                  RequestKind request) {
  if (format.quantised_rows) return find_gemms(options.isa, format, RowType::kInt8, options.exact_level);
  const auto wide = find_gemms(options.isa, format, RowType::kFloat32, true);
  if (request == RequestKind::kFloat32) return wide;
  auto found = find_gemms(options.isa, format, RowType::kBFloat16, options.exact_level);
  const auto is_below = [&](const GemmKernel* kernel) { return kernel->isa < wide.front()->isa; };
  // What needs no AVX-512 is measured beside nothing that does but float32 rows, where these are all that there is.
  const bool has_higher = !found.empty() && !is_below(found.front());
  if (has_higher || options.exact_level) std::erase_if(found, is_below);
  // Integers are faster than float32 at every number of rows where they are of one level.
  if (has_higher && (options.exact_level || options.isa == Isa::kAvx2)) return found;
  found.insert(found.end(), wide.begin(), wide.end());
  return found;
}

bool can_compute(const GemmKernel& kernel, const WeightFormat& format, RequestKind request) {
  if (!kernel.supports(format)) return false;
  if (format.quantised_rows) return kernel.row_type == RowType::kInt8;
  if (kernel.row_type == RowType::kBFloat16) return request == RequestKind::kBFloat16;
  return kernel.row_type == RowType::kFloat32;
}

bool does_rows(const GemmKernel& kernel, uint32_t rows) { return kernel.max_rows == 0 || rows <= kernel.max_rows; }

}  // namespace

MatrixPlan::MatrixPlan(const PlanOptions& options, const WeightFormat& format, RequestKind request)
    : format_(format), request_(request), forced_(nullptr), candidates_(find_candidates(options, format, request)) {
  if (candidates_.empty()) {
    throw std::invalid_argument("weight format '" + weight_format_name(format) + "' has no kernel at level " +
                                isa_name(options.isa));
  }
  if (!format.quantised_rows) wide_ = find_gemms(options.isa, format, RowType::kFloat32, true).front();
  if (options.forced != nullptr && can_compute(*options.forced, format, request)) forced_ = options.forced;
  for (size_t range = 0; range < kRowRanges.size(); ++range) choices_[range] = {candidates(range).front(), 0.0};
}

const GemmKernel& MatrixPlan::kernel(uint32_t rows) const {
  if (forced_ != nullptr && does_rows(*forced_, rows)) return *forced_;
  const auto first_beyond = std::upper_bound(kRowRanges.begin(), kRowRanges.end(), rows);
  return *choices_[static_cast<size_t>(first_beyond - kRowRanges.begin()) - 1].kernel;
}

std::vector<const GemmKernel*> MatrixPlan::candidates(size_t range) const {
  const uint32_t last = rows_to(range);
  if (forced_ != nullptr && does_rows(*forced_, last)) return {forced_};
  std::vector<const GemmKernel*> found;
  for (const GemmKernel* kernel : candidates_) {
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
    first_.push_back(plans_.size());
    std::vector<WeightFormat> formats{layout.gate_up.format, layout.down.format};
    if (layout.mixed) formats.push_back(layout.gate.format);
    for (const WeightFormat& format : formats) {
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

std::vector<MatrixKind> KernelPlan::kinds(size_t layout) const {
  const size_t end = layout + 1 < first_.size() ? first_[layout + 1] : plans_.size();
  std::vector<MatrixKind> found{MatrixKind::kGateUp, MatrixKind::kDown};
  if (end - first_[layout] > 4) found.push_back(MatrixKind::kGate);
  return found;
}

bool KernelPlan::restore(const std::vector<std::pair<std::string, double>>& choices) {
  if (choices.size() != plans_.size() * kRowRanges.size()) return false;
  auto next = choices.begin();
  for (MatrixPlan& plan : plans_) {
    for (size_t range = 0; range < kRowRanges.size(); ++range, ++next) {
      // With float32 rows the one candidate is chosen whatever was measured; with int8 ones, both requests share it.
      const auto candidates = plan.candidates(range);
      const auto found = std::find_if(candidates.begin(), candidates.end(),
                                      [&](const GemmKernel* kernel) { return next->first == kernel->name; });
      if (found == candidates.end()) return false;
      plan.choose(range, {*found, next->second});
    }
  }
  return true;
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kMatrixBudget{140};
constexpr int kRepetitions = 5;
constexpr uint32_t kMaxRows = kRowRanges.back();
constexpr size_t kTaskBytes = size_t{256} << 10;  // of weights, while there are few rows
constexpr double kTaskOperations = 16e6;          // multiply-adds of a task with many rows
// Tasks for each thread in one measurement, with up to this many rows: there a single task is so short that start
// and barrier would decide which kernel is the fastest.
constexpr uint32_t kTasksPerThread = 4;
constexpr uint32_t kFewRows = 8;
// A kernel that was slower than the best by this factor in two ranges running is not measured with more rows. Tile
// kernels are: with few rows most of a tile is idle.
constexpr double kHopeless = 1.6;

size_t stride_of(RowType type, const PanelLayout& layout) {
  return row_stride(layout.k_padded * element_bytes(type));
}

// Panels of matrices of one layout, taken in turn so that no two measurements meet the same ones soon.
class PanelRing {
 public:
  PanelRing(size_t panel_bytes, uint32_t panels, const std::vector<const std::byte*>& matrices, size_t offset = 0)
      : matrices_(matrices), panel_bytes_(panel_bytes), offset_(offset), panels_(panels) {}

  // Of one matrix of the experts.
  static PanelRing of_experts(const ExpertLayout& layout, MatrixKind kind,
                              const std::vector<const std::byte*>& experts) {
    if (kind == MatrixKind::kDown) return {layout.down.panel_bytes, layout.down_panels, experts, layout.down_offset};
    if (kind == MatrixKind::kGate) return {layout.gate.panel_bytes, layout.intermediate_blocks, experts};
    if (layout.mixed) return {layout.gate_up.panel_bytes, layout.intermediate_blocks, experts, layout.up_offset};
    return {layout.gate_up.panel_bytes, layout.intermediate_blocks * layout.panels_per_column_block, experts};
  }

  uint32_t panels() const { return panels_; }
  // The i-th run of `count` <= panels() panels.
  const std::byte* run(size_t i, uint32_t count) const {
    const size_t runs = panels_ / count;
    return matrices_[i / runs % matrices_.size()] + offset_ + i % runs * count * panel_bytes_;
  }

 private:
  const std::vector<const std::byte*>& matrices_;
  size_t panel_bytes_;
  size_t offset_;
  uint32_t panels_;
};

class MatrixCalibration {
 public:
  MatrixCalibration(const PanelLayout& layout, const PanelRing& ring, ThreadPool& pool)
      : layout_(layout),
        ring_(ring),
        pool_(pool),
        scales_(kMaxRows, 0.01f),
        results_(pool.size()),
        scratch_(pool.size()) {
    const size_t bytes = kMaxRows * stride_of(RowType::kFloat32, layout_);
    rows_.grow(bytes);
    // 1.0 and a little more in float32, and finite in bfloat16: times depend on no value.
    std::fill_n(rows_.as<uint32_t>(), bytes / sizeof(uint32_t), 0x3f803f80u);
  }

  void run(MatrixPlan& plan) {
    const auto deadline = Clock::now() + kMatrixBudget;
    std::vector<std::pair<const GemmKernel*, int>> slow;  // kernel, ranges running in which it was hopeless
    MatrixPlan::Choice last{nullptr, 0.0};
    for (size_t range = 0; range < kRowRanges.size(); ++range) {
      // Measured without a choice, too: one row is the roofline that a live view shows, all of them are what
      // `moebius plan` predicts from (kernel_times.py), and without AVX-512 there is one kernel.
      const auto candidates = plan.candidates(range);
      if (last.kernel != nullptr && Clock::now() > deadline) {
        if (std::find(candidates.begin(), candidates.end(), last.kernel) != candidates.end()) {
          plan.choose(range, {last.kernel, 0.0});
        }
        continue;
      }
      last = fastest(candidates, kRowRanges[range], slow);
      plan.choose(range, last);
    }
  }

 private:
  MatrixPlan::Choice fastest(const std::vector<const GemmKernel*>& candidates, uint32_t rows,
                             std::vector<std::pair<const GemmKernel*, int>>& slow) {
    MatrixPlan::Choice best{nullptr, std::numeric_limits<double>::infinity()};
    std::vector<double> times(candidates.size(), std::numeric_limits<double>::infinity());
    auto entry = [&](const GemmKernel* kernel) -> int& {
      for (auto& [known, count] : slow) {
        if (known == kernel) return count;
      }
      return slow.emplace_back(kernel, 0).second;
    };
    // In turn: what disturbs the machine for a while disturbs all of them.
    for (int repetition = 0; repetition < kRepetitions; ++repetition) {
      for (size_t i = 0; i < candidates.size(); ++i) {
        if (entry(candidates[i]) < 2) times[i] = std::min(times[i], measure(*candidates[i], rows));
      }
    }
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (times[i] < best.nanoseconds) best = {candidates[i], times[i]};
    }
    if (best.kernel == nullptr) return {candidates.front(), 0.0};
    for (size_t i = 0; i < candidates.size(); ++i) {
      int& count = entry(candidates[i]);
      const bool slow_again = times[i] > kHopeless * best.nanoseconds && candidates[i]->spaced_rows == 0;
      if (count < 2) count = slow_again ? count + 1 : 0;
    }
    return best;
  }

  // Nanoseconds for one panel with all threads at work: the wall time of a loop over its panels.
  double measure(const GemmKernel& kernel, uint32_t rows) {
    const size_t by_bytes = kTaskBytes / layout_.panel_bytes;
    const auto by_work = static_cast<size_t>(kTaskOperations / (16.0 * layout_.k_padded * rows));
    const auto count = static_cast<uint32_t>(
        std::clamp<size_t>(std::min(by_bytes, by_work) / 2 * 2, std::min(2u, ring_.panels()), ring_.panels()));
    std::vector<const void*> pointers(rows);
    const size_t stride = stride_of(kernel.row_type, layout_);
    for (uint32_t row = 0; row < rows; ++row) pointers[row] = rows_.data() + row * stride;
    if (kernel.prepare_row != nullptr) prepare(kernel, pointers);
    const uint32_t tasks = pool_.size() * (rows <= kFewRows ? kTasksPerThread : 1);
    const auto start = Clock::now();
    pool_.parallel_for(tasks, [&](uint32_t task, uint32_t worker) {
      multiply(kernel, ring_.run(next_run_ + task, count), count, pointers, stride, worker);
    });
    const double time = std::chrono::duration<double, std::nano>(Clock::now() - start).count();
    next_run_ += tasks;
    return time / (static_cast<double>(tasks) * count);
  }

  // All rows are alike; what is made of one of them serves all.
  void prepare(const GemmKernel& kernel, std::vector<const void*>& pointers) {
    prepared_.grow(kernel.prepared_row_bytes(layout_));
    kernel.prepare_row(layout_, pointers.front(), prepared_.data());
    std::fill(pointers.begin(), pointers.end(), prepared_.data());
  }

  void multiply(const GemmKernel& kernel, const std::byte* panels, uint32_t count,
                const std::vector<const void*>& pointers, size_t stride, uint32_t worker) {
    const auto rows = static_cast<uint32_t>(pointers.size());
    const size_t result_stride = size_t{kPanelColumns} * count;
    results_[worker].grow(rows * result_stride * sizeof(float));
    scratch_[worker].grow(kernel.scratch_bytes(layout_, count, rows));
    kernel.run({&layout_, panels, count, pointers.data(), stride, scales_.data(), rows, results_[worker].as<float>(),
                result_stride, scratch_[worker].data()});
  }

  const PanelLayout& layout_;
  PanelRing ring_;
  ThreadPool& pool_;
  size_t next_run_ = 0;
  AlignedBuffer rows_;
  AlignedBuffer prepared_;
  std::vector<float> scales_;
  std::vector<AlignedBuffer> results_;  // [workers]
  std::vector<AlignedBuffer> scratch_;  // [workers]
};

}  // namespace

void calibrate_plan(KernelPlan& plan, size_t layout_index, const ExpertLayout& layout,
                    const std::vector<const std::byte*>& experts, ThreadPool& pool) {
  for (const MatrixKind kind : plan.kinds(layout_index)) {
    MatrixPlan& narrow = plan.matrix(layout_index, kind, RequestKind::kBFloat16);
    const PanelLayout& matrix = kind == MatrixKind::kDown   ? layout.down
                                : kind == MatrixKind::kGate ? layout.gate
                                                            : layout.gate_up;
    MatrixCalibration(matrix, PanelRing::of_experts(layout, kind, experts), pool).run(narrow);
    MatrixPlan& wide = plan.matrix(layout_index, kind, RequestKind::kFloat32);
    if (!wide.format().quantised_rows) continue;
    // Both kinds of requests are computed from the same int8 rows.
    for (size_t range = 0; range < kRowRanges.size(); ++range) wide.choose(range, narrow.choice(range));
  }
}

void calibrate_matrix(MatrixPlan& plan, const PanelLayout& layout, const std::byte* panels, uint32_t num_panels,
                      ThreadPool& pool) {
  bool has_choice = false;
  for (size_t range = 0; range < kRowRanges.size(); ++range) has_choice |= plan.candidates(range).size() > 1;
  if (!has_choice) return;
  const std::vector<const std::byte*> matrices{panels};
  MatrixCalibration(layout, PanelRing(layout.panel_bytes, num_panels, matrices), pool).run(plan);
}

}  // namespace moebius
