// Workers for fork-join loops of a few microseconds. The caller is worker 0 and computes too, so N threads
// need N cores and no dispatcher. A loop ends when its *tasks* are done, not when every worker has arrived:
// a worker that the scheduler keeps away delays nothing, which makes threads = cores safe on a busy machine.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace moebius {

class ThreadPool {
 public:
  using TaskFn = void (*)(void* context, uint32_t task, uint32_t worker);

  static constexpr uint32_t kMaxTasks = (1u << 18) - 1;

  // num_threads 0: one per cpu given, else one per cpu this thread may use. cpus[i % n] pins worker i for
  // i >= 1; cpus[0] is left to the caller, whose thread is not ours to pin. Throws std::invalid_argument
  // when a cpu can not be used.
  ThreadPool(uint32_t num_threads, const std::vector<int>& cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  uint32_t size() const { return num_threads_; }

  // Runs fn(task, worker) for every task in [0, num_tasks), handed out in ascending order; returns when all
  // are done or, with one thread, at the first exception. The first exception of a task is rethrown here, with
  // no task left running. Calls from several threads are served one after the other; calls from inside a task
  // are not allowed.
  template <class Fn>
  void parallel_for(uint32_t num_tasks, Fn&& fn) {
    using Callable = std::remove_reference_t<Fn>;
    const TaskFn call = [](void* context, uint32_t task, uint32_t worker) {
      (*static_cast<Callable*>(context))(task, worker);
    };
    run(num_tasks, call, const_cast<std::remove_const_t<Callable>*>(&fn));
  }

 private:
  void run(uint32_t num_tasks, TaskFn fn, void* context);
  void start(const std::vector<int>& cpus);
  void stop();
  void worker_loop(uint32_t worker);
  bool run_one_task(uint32_t worker);
  void wait_for_work();
  void wait_until_done(uint32_t num_tasks);
  void record_exception();

  uint32_t num_threads_;
  std::chrono::nanoseconds spin_;
  std::vector<std::thread> threads_;
  std::mutex run_mutex_;
  std::mutex exception_mutex_;
  std::exception_ptr exception_;

  // Epoch, total and next task of the running loop in one word: a claim succeeds only while its own loop is
  // open, so a late worker can neither touch a finished loop nor steal from the next one by mistake.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<TaskFn> fn_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<uint32_t> caller_asleep_{0};
  alignas(64) std::atomic<uint32_t> wake_word_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace moebius
