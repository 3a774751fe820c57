#include "kernels/pool/thread_pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/pool/futex.h"
#include "kernels/pool/limits.h"

namespace moebius {
namespace {

uint32_t ticket_next(uint64_t ticket) { return static_cast<uint32_t>(ticket); }
uint32_t ticket_total(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
bool ticket_open(uint64_t ticket) { return ticket_next(ticket) < ticket_total(ticket); }

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
  if (ready()) return true;
  if (limit.count() == 0) return false;
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

ThreadPool::ThreadPool(uint32_t num_threads, const std::vector<int>& cpus, std::chrono::nanoseconds spin)
    : num_threads_(num_threads == 0 ? pool::default_threads(cpus) : num_threads),
      spin_ns_(0),
      claimed_(num_threads_) {
  set_spin(spin);
  try {
    start(cpus);
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::set_spin(std::chrono::nanoseconds spin) {
  spin_ns_.store((spin.count() < 0 ? pool::default_spin(num_threads_) : spin).count(), std::memory_order_relaxed);
}

void ThreadPool::count_progress_in(uint64_t* word) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  progress_ = word;
}

void ThreadPool::note_progress() const {
  if (progress_ != nullptr) std::atomic_ref<uint64_t>(*progress_).fetch_add(1, std::memory_order_relaxed);
}

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

void ThreadPool::run(Phase* phases, uint32_t num_phases) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  if (num_threads_ == 1) return run_alone(phases, num_phases);
  phases_begin_ = phases;
  next_phase_ = phases;
  phases_end_ = phases + num_phases;
  const uint32_t finished_before = finished_.load(std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  open_next_stage();
  while (finished_.load(std::memory_order_acquire) == finished_before) {
    if (!run_one_task(0)) wait_as_caller(finished_before);
    note_progress();
  }
  note_progress();
  if (exception_) std::rethrow_exception(std::exchange(exception_, nullptr));
}

void ThreadPool::run_alone(Phase* phases, uint32_t num_phases) {
  for (const Phase* phase = phases; phase != phases + num_phases; ++phase) {
    const uint32_t count = phase->count(phase->context);
    for (uint32_t task = 0; task < count; ++task) {
      const NextTask next{static_cast<uint32_t>(phase - phases), task + 1};
      phase->task(phase->context, task, 0, task + 1 < count ? next : NextTask{});
      note_progress();
    }
  }
}

// A task of the open stage, if any is left. The claim acquires what the stage's opener wrote.
std::optional<uint64_t> ThreadPool::claim() {
  if (!ticket_open(ticket_.load(std::memory_order_relaxed))) return std::nullopt;
  const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acquire);
  return ticket_open(ticket) ? std::optional(ticket) : std::nullopt;
}

// Runs the task that the worker has claimed, or claims one; false when none is left.
bool ThreadPool::run_one_task(uint32_t worker) {
  std::optional<uint64_t> ticket = std::exchange(claimed_[worker].ticket, std::nullopt);
  if (!ticket) ticket = claim();
  if (!ticket) return false;
  run_task(*ticket, worker);
  return true;
}

// The stage stays open until the task that is about to run is done.
NextTask ThreadPool::claim_next(const Phase& phase, uint32_t worker) {
  if (!phase.takes_next) return {};
  std::optional<uint64_t>& ticket = claimed_[worker].ticket;
  ticket = claim();
  if (!ticket) return {};
  const uint32_t task = ticket_next(*ticket);
  const Phase* next = &phase;
  while (task >= next->end) ++next;
  return {static_cast<uint32_t>(next - phases_begin_), task - next->begin};
}

// Tasks are claimed in order and none waits but for earlier ones, so a thread that waits always waits for others that
// are at work.
void ThreadPool::run_task(uint64_t ticket, uint32_t worker) {
  const uint32_t task = ticket_next(ticket);
  const uint32_t total = ticket_total(ticket);
  const Phase* phase = stage_;
  while (task >= phase->end) ++phase;
  const uint32_t end = phase->end;
  wait_for_phase(*phase, task - phase->begin);
  const NextTask next = claim_next(*phase, worker);
  if (phase->begin == 0 || !failed_.load(std::memory_order_relaxed)) {
    try {
      phase->task(phase->context, task - phase->begin, worker, next);
    } catch (...) {
      record_exception();
    }
  }
  // Releases this task's writes to the thread that finishes last, which acquires those of all others.
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 != end) return;
  if (end == total) return open_next_stage();
  opened_.store(end);
  wake_sleepers(INT_MAX);
}

void ThreadPool::wait_for_phase(const Phase& phase, uint32_t task) {
  const Gate opened(opened_, phase.begin);
  if (opened()) return;
  phase.prepare(phase.context, task, opened);
  if (spin_until(spin(), opened)) return;
  while (!opened()) {
    const uint32_t word = wake_word_.load();
    sleepers_.fetch_add(1);
    if (opened_.load() < phase.begin) pool::futex_wait(wake_word_, word);
    sleepers_.fetch_sub(1);
  }
}

// Called when no task is open or running: at the start by the caller, then by the thread that did the last task.
// Either opens the next stage that has tasks or ends the run, after which the phases are the caller's again.
void ThreadPool::open_next_stage() {
  const uint32_t count = gather_stage();
  if (count == 0) {
    finished_.fetch_add(1);
  } else {
    done_.store(0, std::memory_order_relaxed);
    opened_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(count) << 32);
    if (count > 1) wake_sleepers(static_cast<int>(std::min<uint32_t>(count - 1, INT_MAX)));
  }
  if (caller_asleep_.load() != 0) {
    caller_word_.fetch_add(1);
    pool::futex_wake(caller_word_);
  }
}

// A sleeper counts itself, then looks for what it waits for; here what it waits for came first. One side sees the
// other.
void ThreadPool::wake_sleepers(int count) {
  if (sleepers_.load() == 0) return;
  wake_word_.fetch_add(1);
  pool::futex_wake(wake_word_, count);
}

// The next phases, up to one that has to be counted when they are done; their number of tasks, which is 0 only when
// there are none left or a task or a count has thrown.
uint32_t ThreadPool::gather_stage() {
  try {
    while (!failed_.load(std::memory_order_relaxed) && next_phase_ != phases_end_) {
      stage_ = next_phase_;
      uint32_t total = 0;
      do {
        next_phase_->begin = total;
        total += next_phase_->count(next_phase_->context);
        next_phase_->end = total;
        ++next_phase_;
      } while (next_phase_ != phases_end_ && !next_phase_->counts_late);
      if (total > 0) return total;
    }
  } catch (...) {
    record_exception();
  }
  return 0;
}

void ThreadPool::record_exception() {
  std::lock_guard<std::mutex> lock(exception_mutex_);
  if (!exception_) exception_ = std::current_exception();
  failed_.store(true, std::memory_order_relaxed);
}

void ThreadPool::worker_loop(uint32_t worker) {
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (!run_one_task(worker)) wait_for_work();
  }
}

void ThreadPool::wait_for_work() {
  auto due = [this] { return ticket_open(ticket_.load()) || stopping_.load(); };
  if (spin_until(spin(), due)) return;
  const uint32_t word = wake_word_.load();
  sleepers_.fetch_add(1);
  if (!due()) pool::futex_wait(wake_word_, word);
  sleepers_.fetch_sub(1);
}

// Waits until the run is finished or its next phase is open.
void ThreadPool::wait_as_caller(uint32_t finished_before) {
  auto due = [&] { return ticket_open(ticket_.load()) || finished_.load() != finished_before; };
  if (spin_until(spin(), due)) return;
  const uint32_t word = caller_word_.load();
  caller_asleep_.store(1);
  if (!due()) pool::futex_wait(caller_word_, word);
  caller_asleep_.store(0);
}

}  // namespace moebius
