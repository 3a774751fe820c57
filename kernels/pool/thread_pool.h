// Workers for fork-join loops of a few microseconds. The caller is worker 0 and computes too, so N threads
// need N cores and no dispatcher. A loop ends when its *tasks* are done, not when every worker has arrived:
// a worker that the scheduler keeps away delays nothing, which makes threads = cores safe on a busy machine.
//
// Loops that depend on each other run as phases of one run:
//
//   pool.run_phases(
//       pool_phase(num_gate_up_tasks, [&](uint32_t task, uint32_t worker) { ... }),
//       pool_phase([&] { return num_down_tasks(); }, [&](uint32_t task, uint32_t worker) { ... }));
//
// One broadcast starts the run. Whoever finishes the last task of a phase opens the next one, so between two
// phases there is one barrier and nobody has to wake the caller first; who finds no task left spins a moment
// and then sleeps until the next phase opens.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace moebius {

// `count` is a number of tasks or a callable that returns it. A callable is called once, by an arbitrary thread of the
// pool, when all phases before are done: it sees what they wrote, and may write what its own tasks read.
template <class Count, class Fn>
struct PoolPhase {
  Count count;
  Fn fn;  // fn(uint32_t task, uint32_t worker)
};

template <class Count, class Fn>
PoolPhase<Count, Fn> pool_phase(Count count, Fn fn) {
  return {std::move(count), std::move(fn)};
}

class ThreadPool {
 public:
  static constexpr std::chrono::microseconds kDefaultSpin{-1};

  // num_threads 0: one per cpu given, else one per cpu this thread may use, within the cgroup's quota (limits.h).
  // cpus[i % n] pins worker i for i >= 1; cpus[0] is left to the caller, whose thread is not ours to pin. `spin` is
  // how long a thread without work spins before it sleeps; 0: not at all; negative: as limits.h says. Throws
  // std::invalid_argument when a cpu can not be used.
  ThreadPool(uint32_t num_threads, const std::vector<int>& cpus, std::chrono::nanoseconds spin = kDefaultSpin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  uint32_t size() const { return num_threads_; }
  std::chrono::nanoseconds spin() const { return spin_; }

  // Runs the phases in order, each with fn(task, worker) for every task in [0, count), handed out in ascending order
  // to whoever is free; a phase begins when all tasks of the one before are done and sees what they wrote. worker
  // is below size(), and no two tasks run at once with the same one. Returns when the last phase is done.
  //
  // After an exception of a task or of a count no further phase begins (with one thread, no further task); the
  // first exception is rethrown here, with no task left running. Calls from several threads are served one after
  // the other; calls from inside a task are not allowed.
  template <class... Counts, class... Fns>
  void run_phases(PoolPhase<Counts, Fns>... phases) {
    const std::array<Phase, sizeof...(phases)> erased{erase(phases)...};
    run(erased.data(), static_cast<uint32_t>(erased.size()));
  }

  // A run of one phase.
  template <class Fn>
  void parallel_for(uint32_t num_tasks, Fn&& fn) {
    run_phases(pool_phase(num_tasks, [&fn](uint32_t task, uint32_t worker) { fn(task, worker); }));
  }

 private:
  struct Phase {
    uint32_t (*count)(void* context);
    void (*task)(void* context, uint32_t task, uint32_t worker);
    void* context;
  };

  template <class Count, class Fn>
  static Phase erase(PoolPhase<Count, Fn>& phase) {
    using Target = PoolPhase<Count, Fn>;
    return {[](void* context) {
              Count& count = static_cast<Target*>(context)->count;
              if constexpr (std::invocable<Count&>) {
                return static_cast<uint32_t>(count());
              } else {
                return static_cast<uint32_t>(count);
              }
            },
            [](void* context, uint32_t task, uint32_t worker) { static_cast<Target*>(context)->fn(task, worker); },
            &phase};
  }

  void start(const std::vector<int>& cpus);
  void stop();
  void run(const Phase* phases, uint32_t num_phases);
  void run_alone(const Phase* phases, uint32_t num_phases);
  bool run_one_task(uint32_t worker);
  void open_next_phase();
  uint32_t next_count();
  void record_exception();
  void worker_loop(uint32_t worker);
  void wait_for_work();
  void wait_as_caller(uint32_t finished_before);

  uint32_t num_threads_;
  std::chrono::nanoseconds spin_;
  std::vector<std::thread> threads_;
  std::mutex run_mutex_;

  // The run in progress. Written between phases only, by the one thread that opens the next phase; read by a
  // thread that has claimed a task, which keeps the phase open until that task is done.
  const Phase* phase_ = nullptr;
  const Phase* next_phase_ = nullptr;
  const Phase* phases_end_ = nullptr;
  std::mutex exception_mutex_;
  std::exception_ptr exception_;

  // [total 32 | next 32] of the open phase. A claim is one compare-and-swap from `next` to `next + 1`, so whoever
  // succeeds, however late, owns a task of the phase that is open at that moment.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};       // tasks of the open phase
  alignas(64) std::atomic<uint32_t> finished_{0};   // runs
  std::atomic<uint32_t> caller_word_{0};            // futex of the caller, changed to wake it
  std::atomic<uint32_t> caller_asleep_{0};
  alignas(64) std::atomic<uint32_t> wake_word_{0};  // futex of the workers, changed to wake them
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace moebius
