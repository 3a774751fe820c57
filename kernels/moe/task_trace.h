// Which thread computed what and when, on demand: a span for each call and for each task of its phases.
//
// Switched and read under the engine's lock, between two calls; written during a call, each worker its own list. Off it
// costs a task the test of a pointer.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace moebius {

// Numbers that moebius/kernels/__init__.py names.
enum class TaskKind : uint32_t { kCall = 0, kRows = 1, kGateUp = 2, kActivation = 3, kDown = 4 };

struct TaskSpan {
  TaskKind kind;
  uint32_t worker;  // of the pool, where the caller's thread is 0; its size for a whole call
  uint32_t layer;
  int32_t expert;   // global id; -1: all experts of the call
  uint32_t rows;    // of that expert, or of the call
  int64_t begin_ns; // CLOCK_MONOTONIC
  int64_t end_ns;
};

class TaskTrace {
 public:
  bool is_on() const { return !spans_.empty(); }

  // Keeps the first `most` spans of each worker from now on.
  void start(uint32_t workers, size_t most) {
    most_ = most;
    spans_.assign(workers, {});
    dropped_.assign(workers, 0);
    for (auto& spans : spans_) spans.reserve(most);
  }

  // All spans, worker after worker, and how many more there were.
  std::pair<std::vector<TaskSpan>, uint64_t> stop() {
    std::vector<TaskSpan> all;
    uint64_t dropped = 0;
    for (const auto& spans : spans_) all.insert(all.end(), spans.begin(), spans.end());
    for (const uint64_t count : dropped_) dropped += count;
    spans_.clear();
    return {std::move(all), dropped};
  }

  void add(const TaskSpan& span) {
    auto& spans = spans_[span.worker];
    if (spans.size() < most_) spans.push_back(span);
    else ++dropped_[span.worker];
  }

 private:
  size_t most_ = 0;
  std::vector<std::vector<TaskSpan>> spans_;  // [workers]; empty: off
  std::vector<uint64_t> dropped_;             // [workers]
};

// The span of the block it stands in; nothing where `trace` is null.
class TaskScope {
 public:
  TaskScope(TaskTrace* trace, TaskKind kind, uint32_t worker, uint32_t layer, int32_t expert, uint32_t rows)
      : trace_(trace) {
    if (trace_ != nullptr) span_ = {kind, worker, layer, expert, rows, now_ns(), 0};
  }
  ~TaskScope() {
    if (trace_ == nullptr) return;
    span_.end_ns = now_ns();
    trace_->add(span_);
  }
  TaskScope(const TaskScope&) = delete;
  TaskScope& operator=(const TaskScope&) = delete;

 private:
  static int64_t now_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  TaskTrace* const trace_;
  TaskSpan span_;
};

}  // namespace moebius
