// Which GEMM kernel computes an expert, by the number of its rows.
//
// Requests come in two kinds. Rows in float32 or float16 are computed exactly, by the float32-row kernel of the
// highest level: the choice depends on nothing that is measured, so a row's bits never depend on timing. Rows in
// bfloat16 may take a bfloat16-row kernel of any level, or that float32-row kernel where it is faster. Formats
// with quantised rows always take int8 rows.
//
// Until it is calibrated a plan takes the first candidate: the highest level's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/isa/isa.h"

namespace moebius {

// kGate: where gate has a format of its own; kGateUp is up's then.
enum class MatrixKind : uint8_t { kGateUp = 0, kDown = 1, kGate = 2 };
enum class RequestKind : uint8_t { kFloat32 = 0, kBFloat16 = 1 };

// Row counts are planned for in ranges: from an entry to just below the next; the last has no end.
constexpr std::array<uint32_t, 17> kRowRanges = {1,  2,  3,  4,  6,   8,   12,  16, 24,
                                                 32, 48, 64, 96, 128, 192, 256, 512};
constexpr uint32_t kNoEnd = UINT32_MAX;

// Filled by the engine's constructor.
struct PlanOptions {
  Isa isa;                      // highest level to use
  bool exact_level;             // only that level's kernels, or the next lower one's where it has none
  const GemmKernel* forced;  // used wherever it can be; null: none
};

// The kernels of one matrix and one kind of request.
class MatrixPlan {
 public:
  struct Choice {
    const GemmKernel* kernel;
    double nanoseconds;  // measured for one panel and the range's first row count, all threads busy; 0: not measured
  };

  // Throws std::invalid_argument when no kernel computes the format.
  MatrixPlan(const PlanOptions& options, const WeightFormat& format, RequestKind request);

  const GemmKernel& kernel(uint32_t rows) const;
  // The one that reads float32 rows; null of formats with quantised rows.
  const GemmKernel* wide_kernel() const { return wide_; }
  // Kernels to choose from in a range, the likely fastest first; one if there is no choice.
  std::vector<const GemmKernel*> candidates(size_t range) const;
  const Choice& choice(size_t range) const { return choices_[range]; }
  void choose(size_t range, const Choice& choice) { choices_[range] = choice; }
  const WeightFormat& format() const { return format_; }
  RequestKind request() const { return request_; }

  static uint32_t rows_to(size_t range) { return range + 1 < kRowRanges.size() ? kRowRanges[range + 1] - 1 : kNoEnd; }

 private:
  WeightFormat format_;
  RequestKind request_;
  const GemmKernel* forced_;
  std::vector<const GemmKernel*> candidates_;
  const GemmKernel* wide_ = nullptr;
  std::array<Choice, kRowRanges.size()> choices_;
};

// The plans of all layouts of an engine.
class KernelPlan {
 public:
  // Throws std::invalid_argument when a format has no kernel, or when options.forced fits no matrix.
  KernelPlan(const std::vector<ExpertLayout>& layouts, const PlanOptions& options);

  const MatrixPlan& matrix(size_t layout, MatrixKind kind, RequestKind request) const {
    return plans_[index(layout, kind, request)];
  }
  MatrixPlan& matrix(size_t layout, MatrixKind kind, RequestKind request) {
    return plans_[index(layout, kind, request)];
  }
  // The matrices of a layout that have plans.
  std::vector<MatrixKind> kinds(size_t layout) const;
  size_t num_layouts() const { return first_.size(); }
  // Takes kernels by name, with their times: of every layout, matrix, request and range, in this order. False, and the
  // plan is of no use, when they are not as many, or one is no candidate in its place.
  bool restore(const std::vector<std::pair<std::string, double>>& choices);

 private:
  size_t index(size_t layout, MatrixKind kind, RequestKind request) const {
    return first_[layout] + static_cast<size_t>(kind) * 2 + static_cast<size_t>(request);
  }

  std::vector<MatrixPlan> plans_;  // [layouts][matrices][requests]
  std::vector<size_t> first_;      // of each layout
};

// --- Measures the kernels of a plan and keeps the fastest for each range of row counts.

class ThreadPool;

// Measures every matrix of one layout in which there is a choice, on all threads of the pool, over the packed
// `experts` (not empty) one after the other: with enough of them weights come from memory as they do in service.
// Takes about 0.3 s at most; ranges that no time was left for keep the last measured choice.
void calibrate_plan(KernelPlan& plan, size_t layout_index, const ExpertLayout& layout,
                    const std::vector<const std::byte*>& experts, ThreadPool& pool);

// The same for a single matrix of `num_panels` packed panels. Nothing is measured where no range has a choice.
void calibrate_matrix(MatrixPlan& plan, const PanelLayout& layout, const std::byte* panels, uint32_t num_panels,
                      ThreadPool& pool);

}  // namespace moebius
