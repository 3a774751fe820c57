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
// One broadcast starts the run. Tasks of phases whose counts are known before form a stage and are handed out in one
// sequence: a thread that finds no task of a phase left takes one of the next and waits with it until the thread
// with the phase's last task opens the gate. No thread has to wake the caller between phases; one that finds no
// task left, or a gate closed, spins a moment and then sleeps.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace moebius {

// `count` is a number of tasks or a callable that returns it. A callable is called once, by an arbitrary thread of the
// pool, when all phases before are done: it sees what they wrote, and may write what its own tasks read.
//
// `prepare`, if any, is what a thread does with a task of its own until the phases before are done, e.g. prefetch:
// prepare(task, opened) may return at any time and should soon after opened() became true.
//
// `fn` takes the task, the worker and optionally a NextTask: the task that the same thread computes after this one,
// e.g. to prefetch for it. It is claimed before this task begins, so a phase may end later by one task; the last ones
// should be small.
struct NoPreparation {};

struct NextTask {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t phase = kNone;  // of the run, from 0; kNone: there is none yet
  uint32_t task = 0;
};

template <class Count, class Fn, class Prepare = NoPreparation>
struct PoolPhase {
  Count count;
  Fn fn;  // fn(uint32_t task, uint32_t worker) or fn(uint32_t task, uint32_t worker, NextTask next)
  Prepare prepare;
};

template <class Count, class Fn, class Prepare = NoPreparation>
PoolPhase<Count, Fn, Prepare> pool_phase(Count count, Fn fn, Prepare prepare = {}) {
  return {std::move(count), std::move(fn), std::move(prepare)};
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
  std::chrono::nanoseconds spin() const { return std::chrono::nanoseconds(spin_ns_.load(std::memory_order_relaxed)); }
  // Sets the spin time from now on; negative: the default of limits.h.
  void set_spin(std::chrono::nanoseconds spin);

  // From now on the caller's thread adds 1 to the word (relaxed) after each task of its own: it has one at least as
  // often as others finish theirs, or waits for tasks under way. Null: to none. Waits for a run under way.
  void count_progress_in(uint64_t* word);

  // Runs the phases in order, each with fn(task, worker) for every task in [0, count), handed out in ascending order
  // to idle threads; a phase begins when all tasks of the one before are done and sees what they wrote. worker
  // is below size(), and no two tasks run at once with the same one. Returns when the last phase is done.
  //
  // After an exception of a task or of a count no further phase begins (with one thread, no further task); the
  // first exception is rethrown here, with no task left running. Calls from several threads are served one after
  // the other; calls from inside a task are not allowed.
  template <class... Counts, class... Fns, class... Prepares>
  void run_phases(PoolPhase<Counts, Fns, Prepares>... phases) {
    std::array<Phase, sizeof...(phases)> erased{erase(phases)...};
    run(erased.data(), static_cast<uint32_t>(erased.size()));
  }

  // A run of one phase.
  template <class Fn>
  void parallel_for(uint32_t num_tasks, Fn&& fn) {
    run_phases(pool_phase(num_tasks, [&fn](uint32_t task, uint32_t worker) { fn(task, worker); }));
  }

 private:
  // Says whether the phases before a task's own are done.
  class Gate {
   public:
    Gate(const std::atomic<uint32_t>& opened, uint32_t needed) : opened_(opened), needed_(needed) {}
    bool operator()() const { return opened_.load(std::memory_order_acquire) >= needed_; }

   private:
    const std::atomic<uint32_t>& opened_;
    uint32_t needed_;
  };

  struct Phase {
    uint32_t (*count)(void* context);
    void (*task)(void* context, uint32_t task, uint32_t worker, NextTask next);
    void (*prepare)(void* context, uint32_t task, const Gate& opened);
    void* context;
    bool counts_late;  // count is to be called when the phases before are done
    bool takes_next;   // tasks get a NextTask
    uint32_t begin;    // tasks of its stage that come before its own
    uint32_t end;
  };

  template <class Count, class Fn, class Prepare>
  static Phase erase(PoolPhase<Count, Fn, Prepare>& phase) {
    using Target = PoolPhase<Count, Fn, Prepare>;
    constexpr bool kTakesNext = std::invocable<Fn&, uint32_t, uint32_t, NextTask>;
    return {[](void* context) {
              Count& count = static_cast<Target*>(context)->count;
              if constexpr (std::invocable<Count&>) {
                return static_cast<uint32_t>(count());
              } else {
                return static_cast<uint32_t>(count);
              }
            },
            [](void* context, uint32_t task, uint32_t worker, [[maybe_unused]] NextTask next) {
              if constexpr (kTakesNext) {
                static_cast<Target*>(context)->fn(task, worker, next);
              } else {
                static_cast<Target*>(context)->fn(task, worker);
              }
            },
            []([[maybe_unused]] void* context, [[maybe_unused]] uint32_t task, [[maybe_unused]] const Gate& opened) {
              if constexpr (!std::is_same_v<Prepare, NoPreparation>) {
                static_cast<Target*>(context)->prepare(task, opened);
              }
            },
            &phase,
            std::invocable<Count&>,
            kTakesNext,
            0,
            0};
  }

  void start(const std::vector<int>& cpus);
  void stop();
  void run(Phase* phases, uint32_t num_phases);
  void run_alone(Phase* phases, uint32_t num_phases);
  std::optional<uint64_t> claim();
  bool run_one_task(uint32_t worker);
  void run_task(uint64_t ticket, uint32_t worker);
  NextTask claim_next(const Phase& phase, uint32_t worker);
  void open_next_stage();
  uint32_t gather_stage();
  void record_exception();
  void note_progress() const;
  void wait_for_phase(const Phase& phase, uint32_t task);
  void wake_sleepers(int count);
  void worker_loop(uint32_t worker);
  void wait_for_work();
  void wait_as_caller(uint32_t finished_before);

  uint32_t num_threads_;
  std::atomic<std::chrono::nanoseconds::rep> spin_ns_;
  std::vector<std::thread> threads_;
  std::mutex run_mutex_;
  uint64_t* progress_ = nullptr;  // under run_mutex_; the word may lie in shared memory

  // A task that a worker has claimed before it is done with another.
  struct alignas(64) ClaimedTask {
    std::optional<uint64_t> ticket;
  };
  std::vector<ClaimedTask> claimed_;  // [workers], each used by that worker alone

  // The run in progress. Written between stages only, by the one thread that opens the next stage; read by a
  // thread that has claimed a task, which keeps the stage open until that task is done.
  Phase* phases_begin_ = nullptr;
  Phase* stage_ = nullptr;  // its first phase
  Phase* next_phase_ = nullptr;
  Phase* phases_end_ = nullptr;
  std::mutex exception_mutex_;
  std::exception_ptr exception_;
  std::atomic<bool> failed_{false};  // there is an exception

  // [total 32 | next 32] of the open stage. A claim adds 1, so a claim, however late, owns a task of the stage
  // that is open at that moment, or none if `next` had reached `total`.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};       // tasks of the open stage
  alignas(64) std::atomic<uint32_t> opened_{0};     // tasks of the open stage up to the last phase that is done
  alignas(64) std::atomic<uint32_t> finished_{0};   // runs
  std::atomic<uint32_t> caller_word_{0};            // futex of the caller, changed to wake it
  std::atomic<uint32_t> caller_asleep_{0};
  alignas(64) std::atomic<uint32_t> wake_word_{0};  // futex of the workers, changed to wake them
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace moebius
