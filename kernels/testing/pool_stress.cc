#include "kernels/testing/pool_stress.h"

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/pool/thread_pool.h"

namespace moebius::pool {
namespace {

constexpr uint32_t kMostTasks = 7;

// What a task throws on purpose.
struct Planned : std::runtime_error {
  Planned() : std::runtime_error("planned") {}
};

// One run's expectations and results. Nothing here is atomic: the pool alone orders the accesses.
class Run {
 public:
  Run(uint64_t index, bool throws) : index_(index), first_(1 + index % kMostTasks), throws_(throws) {}

  // Adds what was done to `result`.
  void execute(ThreadPool& pool, StressResult& result) {
    announced_.resize(pool.size());
    const uint32_t third = static_cast<uint32_t>(index_ % 3);
    try {
      pool.run_phases(pool_phase(first_, [&](uint32_t task, uint32_t worker) { first_task(task, worker, pool); }),
                      pool_phase([&] { return second_count(); },
                                 [&](uint32_t task, uint32_t worker, NextTask next) {
                                   follow({1, task}, worker, next);
                                   second_task(task);
                                 }),
                      pool_phase(third,
                                 [&](uint32_t task, uint32_t worker, NextTask next) {
                                   follow({2, task}, worker, next);
                                   third_task();
                                 },
                                 [&](uint32_t task, const auto& opened) { prepare_third(task, opened); }));
    } catch (const Planned&) {
      check(throws_ && times_counted_ == 0, "a phase began after an exception");
      ++result.exceptions;
      return;
    }
    check(!throws_ && times_counted_ == 1, "an exception was lost, or a count not called once");
    for (uint32_t task = 0; task < kMostTasks; ++task) {
      check(done_[task] == (task < first_) && done_[kMostTasks + task] == (task < second_),
            "a task was lost or done twice");
    }
    result.tasks += first_ + second_ + third;
  }

 private:
  static uint32_t value(uint64_t index, uint32_t task) { return static_cast<uint32_t>(index * 31 + task); }

  void check(bool holds, const char* what) const {
    if (!holds) throw std::logic_error("run " + std::to_string(index_) + ": " + what);
  }

  void first_task(uint32_t task, uint32_t worker, const ThreadPool& pool) {
    check(worker < pool.size() && task < first_, "task or worker out of range");
    values_[task] = value(index_, task);
    ++done_[task];
    if (throws_ && task == index_ % first_) throw Planned();
  }

  uint32_t second_count() {
    ++times_counted_;
    for (uint32_t task = 0; task < first_; ++task) check(values_[task] == value(index_, task), "a phase began early");
    return second_ = values_[0] % kMostTasks;
  }

  void second_task(uint32_t task) {
    ++done_[kMostTasks + task];
    values_[kMostTasks + task] = values_[task % first_] + task;
  }

  // The task announced to a worker is the one that it runs next.
  void follow(NextTask now, uint32_t worker, NextTask next) {
    NextTask& announced = announced_[worker];
    const bool as_announced = announced.phase == now.phase && announced.task == now.task;
    check(announced.phase == NextTask::kNone || as_announced, "a worker's next task was another one");
    const bool is_later = next.phase > now.phase || (next.phase == now.phase && next.task > now.task);
    check(next.phase == NextTask::kNone || is_later, "a next task is no later one");
    announced = next;
  }

  // Returns early now and then, and waits else.
  template <class Opened>
  void prepare_third(uint32_t task, const Opened& opened) const {
    check(task < index_ % 3, "a preparation out of range");
    for (uint64_t turn = 0; turn < index_ % 64 && !opened(); ++turn) std::this_thread::yield();
  }

  void third_task() const {
    for (uint32_t task = 0; task < second_; ++task) {
      check(values_[kMostTasks + task] == value(index_, task % first_) + task, "a phase began early");
    }
  }

  const uint64_t index_;
  const uint32_t first_;
  const bool throws_;
  uint32_t second_ = 0;
  uint32_t times_counted_ = 0;
  std::vector<NextTask> announced_;  // [workers]
  std::array<uint32_t, 2 * kMostTasks> values_{};
  std::array<uint32_t, 2 * kMostTasks> done_{};
};

bool due(uint64_t index, uint64_t every) { return every != 0 && index % every == every - 1; }

}  // namespace

StressResult stress(const StressOptions& options) {
  // Not on the stack, where the address sanitizer of some builds of GCC 12 and 13 (Ubuntu 24.04's) misplaces what is
  // aligned to 64 bytes.
  const auto owned = std::make_unique<ThreadPool>(options.threads, std::vector<int>{}, options.spin);
  ThreadPool& pool = *owned;
  StressResult result;
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t index = 0; index < options.runs; ++index) {
    Run(index, due(index, options.throw_every)).execute(pool, result);
    if (due(index, options.pause_every)) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace moebius::pool
