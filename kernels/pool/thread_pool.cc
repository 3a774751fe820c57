#include "kernels/pool/thread_pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/pool/futex.h"

namespace moebius {
namespace {

// Ticket: [epoch 28 | total 18 | next 18]. An epoch returns after 2^28 loops; only a worker preempted for
// that long between two instructions could mistake one for the other.
constexpr uint32_t kTaskBits = 18;
constexpr uint64_t kTaskMask = (1u << kTaskBits) - 1;

uint32_t ticket_next(uint64_t ticket) { return static_cast<uint32_t>(ticket & kTaskMask); }
uint32_t ticket_total(uint64_t ticket) { return static_cast<uint32_t>((ticket >> kTaskBits) & kTaskMask); }
bool ticket_open(uint64_t ticket) { return ticket_next(ticket) < ticket_total(ticket); }
uint64_t next_ticket(uint64_t ticket, uint32_t total) {
  const uint64_t epoch = (ticket >> (2 * kTaskBits)) + 1;
  return (epoch << (2 * kTaskBits)) | (static_cast<uint64_t>(total) << kTaskBits);
}

uint32_t usable_cpu_count() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return std::max(1u, std::thread::hardware_concurrency());
  return std::max(1, CPU_COUNT(&set));
}

void pin(std::thread& thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  const int error = pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
  if (error == 0) return;
  throw std::invalid_argument("cpus: a worker can not be pinned to cpu " + std::to_string(cpu) + ": " +
                              std::strerror(error));
}

// Spins until ready() or the time is over; says whether it became ready.
template <class Ready>
bool spin_until(std::chrono::nanoseconds limit, Ready&& ready) {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      _mm_pause();
    }
  } while (std::chrono::steady_clock::now() - start < limit);
  return ready();
}

}  // namespace

ThreadPool::ThreadPool(uint32_t num_threads, const std::vector<int>& cpus) {
  const uint32_t usable = cpus.empty() ? usable_cpu_count() : static_cast<uint32_t>(cpus.size());
  num_threads_ = num_threads == 0 ? usable : num_threads;
  // Between two layers the rest of the model computes for ~100 us: worth spinning through when a core is
  // to spare. With no core to spare a spinner takes time from whoever it waits for.
  spin_ = num_threads_ < usable_cpu_count() ? std::chrono::microseconds(100) : std::chrono::microseconds(20);
  try {
    start(cpus);
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::start(const std::vector<int>& cpus) {
  for (uint32_t worker = 1; worker < num_threads_; ++worker) {
    threads_.emplace_back([this, worker] { worker_loop(worker); });
    pthread_setname_np(threads_.back().native_handle(), ("experts-" + std::to_string(worker)).c_str());
    if (!cpus.empty()) pin(threads_.back(), cpus[worker % cpus.size()]);
  }
}

void ThreadPool::stop() {
  stopping_.store(true);
  wake_word_.fetch_add(1);
  pool::futex_wake(wake_word_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadPool::run(uint32_t num_tasks, TaskFn fn, void* context) {
  if (num_tasks == 0) return;
  if (num_tasks > kMaxTasks) {
    throw std::invalid_argument("parallel_for: more than " + std::to_string(kMaxTasks) + " tasks");
  }
  std::lock_guard<std::mutex> lock(run_mutex_);
  if (num_threads_ == 1 || num_tasks == 1) {
    for (uint32_t task = 0; task < num_tasks; ++task) fn(context, task, 0);
    return;
  }
  done_.store(0, std::memory_order_relaxed);
  fn_.store(fn, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  ticket_.store(next_ticket(ticket_.load(std::memory_order_relaxed), num_tasks));
  if (sleepers_.load() > 0) {
    wake_word_.fetch_add(1);
    pool::futex_wake(wake_word_, static_cast<int>(num_tasks - 1));
  }
  while (run_one_task(0)) {
  }
  wait_until_done(num_tasks);
  if (exception_) std::rethrow_exception(std::exchange(exception_, nullptr));
}

// Claims and runs one task; false when none is left. fn_ and context_ are read before the claim: they can
// only be overwritten once the loop is over, and then the claim fails.
bool ThreadPool::run_one_task(uint32_t worker) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    if (!ticket_open(ticket)) return false;
    const TaskFn fn = fn_.load(std::memory_order_relaxed);
    void* const context = context_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;
    }
    try {
      fn(context, ticket_next(ticket), worker);
    } catch (...) {
      record_exception();
    }
    const bool last = done_.fetch_add(1) + 1 == ticket_total(ticket);
    if (last && caller_asleep_.load() != 0) pool::futex_wake(done_);
    return true;
  }
}

void ThreadPool::record_exception() {
  std::lock_guard<std::mutex> lock(exception_mutex_);
  if (!exception_) exception_ = std::current_exception();
}

void ThreadPool::wait_until_done(uint32_t num_tasks) {
  auto finished = [&] { return done_.load(std::memory_order_acquire) == num_tasks; };
  if (spin_until(spin_, finished)) return;
  caller_asleep_.store(1);
  for (;;) {
    const uint32_t done = done_.load();
    if (done == num_tasks) break;
    pool::futex_wait(done_, done);
  }
  caller_asleep_.store(0);
}

void ThreadPool::worker_loop(uint32_t worker) {
  while (!stopping_.load()) {
    if (!run_one_task(worker)) wait_for_work();
  }
}

void ThreadPool::wait_for_work() {
  auto due = [this] {
    return ticket_open(ticket_.load(std::memory_order_acquire)) || stopping_.load(std::memory_order_relaxed);
  };
  if (spin_until(spin_, due)) return;
  // The order word, sleepers, ticket pairs with run(): ticket, sleepers, word. One side sees the other.
  const uint32_t word = wake_word_.load();
  sleepers_.fetch_add(1);
  if (!ticket_open(ticket_.load()) && !stopping_.load()) pool::futex_wait(wake_word_, word);
  sleepers_.fetch_sub(1);
}

}  // namespace moebius
