#include "kernels/testing/probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "kernels/topology/memory.h"

namespace moebius::probe {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSpins = 20000;  // before a waiting thread offers its cpu to one that has none

// Spins, because the wake-up from a futex would be part of what is measured.
void arrive_and_wait(std::atomic<uint32_t>& arrived, uint32_t expected) {
  arrived.fetch_add(1);
  for (int spins = 0; arrived.load(std::memory_order_acquire) < expected; ++spins) {
    if (spins > kSpins) {
      std::this_thread::yield();
    } else {
      __builtin_ia32_pause();
    }
  }
}

void check_cpus(const std::vector<int>& cpus) {
  if (cpus.empty()) throw std::invalid_argument("cpus is empty; at least one is needed");
  for (int cpu : cpus) {
    if (cpu < 0) throw std::invalid_argument("cpu " + std::to_string(cpu) + " is negative");
  }
}

}  // namespace

double run_together(const std::vector<int>& cpus, const std::function<void(uint32_t)>& work) {
  check_cpus(cpus);
  const auto count = static_cast<uint32_t>(cpus.size());
  std::vector<Clock::time_point> begins(count);
  std::vector<Clock::time_point> ends(count);
  std::atomic<uint32_t> arrived{0};
  std::atomic<int> refused{-1};
  std::vector<std::jthread> threads;
  for (uint32_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      if (!topology::pin_thread({cpus[i]}).applied) refused = cpus[i];
      arrive_and_wait(arrived, count);
      if (refused >= 0) return;
      begins[i] = Clock::now();
      work(i);
      ends[i] = Clock::now();
    });
  }
  threads.clear();  // joins
  if (refused >= 0) {
    throw std::invalid_argument("cpu " + std::to_string(refused.load()) + " can not be used by this process");
  }
  const auto first = *std::min_element(begins.begin(), begins.end());
  const auto last = *std::max_element(ends.begin(), ends.end());
  return std::chrono::duration<double>(last - first).count();
}

namespace {

PeakKernels peaks_of_level(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return peak_kernels_scalar();
    case Isa::kAvx2: return peak_kernels_avx2();
    case Isa::kAvx512: return peak_kernels_avx512();
    case Isa::kAvx512Vnni: return peak_kernels_avx512_vnni();
    case Isa::kAvx512Bf16: return peak_kernels_avx512_bf16();
    case Isa::kAmx: return peak_kernels_amx();
  }
  return {nullptr, 0};
}

}  // namespace

const ReadKernel& read_kernel(Isa isa) {
  if (isa >= Isa::kAvx512) return read_kernel_avx512();
  return isa == Isa::kAvx2 ? read_kernel_avx2() : read_kernel_scalar();
}

std::vector<PeakKernel> peak_kernels(Isa isa) {
  std::vector<PeakKernel> all;
  for (Isa level : supported_isas()) {
    if (level > isa) break;
    const PeakKernels peaks = peaks_of_level(level);
    all.insert(all.end(), peaks.kernels, peaks.kernels + peaks.count);
  }
  return all;
}

PeakKernel peak_kernel(const std::string& name) {
  std::string allowed;
  for (const PeakKernel& kernel : peak_kernels(supported_isas().back())) {
    if (name == kernel.name) return kernel;
    allowed += (allowed.empty() ? "" : ", ") + std::string(kernel.name);
  }
  throw std::invalid_argument("compute unit '" + name + "' is not one of this machine; allowed: " + allowed);
}

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMaxBlock = size_t{1} << 20;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::vector<uint32_t> random_order(size_t count) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(count);  // the same order in every run
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

}  // namespace

BandwidthProbe::BandwidthProbe(Isa isa, std::vector<int> cpus, size_t bytes, bool huge_pages)
    : kernel_(read_kernel(isa)), cpus_(std::move(cpus)) {
  if (cpus_.empty()) throw std::invalid_argument("cpus is empty; at least one is needed");
  if (bytes < cpus_.size() * kMaxBlock) {
    throw std::invalid_argument("nbytes is " + std::to_string(bytes) + "; it must be at least 1 MiB per cpu, " +
                                std::to_string(cpus_.size() * kMaxBlock));
  }
  slice_bytes_ = round_up((bytes + cpus_.size() - 1) / cpus_.size(), kHugePage);
  bytes_ = slice_bytes_ * cpus_.size();
  mapping_bytes_ = bytes_ + kHugePage;
  void* mapping = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(mapping), kHugePage));
  madvise(data_, bytes_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  try {
    run_together(cpus_, [this](uint32_t i) { std::memset(data_ + i * slice_bytes_, 1, slice_bytes_); });
  } catch (...) {
    munmap(mapping_, mapping_bytes_);
    throw;
  }
}

BandwidthProbe::~BandwidthProbe() { munmap(mapping_, mapping_bytes_); }

void BandwidthProbe::check(const ReadPattern& pattern, uint32_t passes) const {
  if (passes == 0) throw std::invalid_argument("passes is 0; at least one is needed");
  if (pattern.block_bytes > kMaxBlock || kMaxBlock % std::max(pattern.block_bytes, kReadStep) != 0) {
    throw std::invalid_argument("block_bytes is " + std::to_string(pattern.block_bytes) +
                                "; allowed: 0, or a power of two from 256 to 1048576");
  }
  const size_t longest = pattern.block_bytes == 0 ? slice_bytes_ : pattern.block_bytes;
  if (pattern.prefetch_bytes % kReadStep != 0 || pattern.prefetch_bytes > longest) {
    throw std::invalid_argument("prefetch_bytes is " + std::to_string(pattern.prefetch_bytes) +
                                "; it must be a multiple of 256 up to " + std::to_string(longest));
  }
}

double BandwidthProbe::measure(const ReadPattern& pattern, uint32_t passes) {
  check(pattern, passes);
  const std::vector<uint32_t> order =
      random_order(pattern.block_bytes == 0 ? 0 : bytes_ / pattern.block_bytes);
  double best = 0;
  for (uint32_t pass = 0; pass < passes; ++pass) {
    const double seconds = pattern.block_bytes == 0 ? pass_contiguous(pattern) : pass_blocks(pattern, order);
    best = std::max(best, static_cast<double>(bytes_) / seconds);
  }
  return best;
}

double BandwidthProbe::pass_contiguous(const ReadPattern& pattern) {
  const auto read = kernel_.read[static_cast<size_t>(pattern.hint)];
  std::atomic<uint64_t> sum{0};
  const double seconds = run_together(cpus_, [&](uint32_t thread) {
    sum += read({data_ + thread * slice_bytes_, slice_bytes_, nullptr, pattern.prefetch_bytes});
  });
  sum_ += sum;
  return seconds;
}

// Each thread claims one block ahead, so that prefetch can cross into it.
double BandwidthProbe::pass_blocks(const ReadPattern& pattern, const std::vector<uint32_t>& order) {
  const auto read = kernel_.read[static_cast<size_t>(pattern.hint)];
  std::atomic<uint64_t> sum{0};
  alignas(64) std::atomic<size_t> next{0};
  const auto claim = [&]() -> const std::byte* {
    const size_t index = next.fetch_add(1, std::memory_order_relaxed);
    return index < order.size() ? data_ + order[index] * pattern.block_bytes : nullptr;
  };
  const double seconds = run_together(cpus_, [&](uint32_t) {
    uint64_t own = 0;
    for (const std::byte* block = claim(); block != nullptr;) {
      const std::byte* following = claim();
      own += read({block, pattern.block_bytes, following, pattern.prefetch_bytes});
      block = following;
    }
    sum += own;
  });
  sum_ += sum;
  return seconds;
}

namespace {

constexpr int kRounds = 5;
constexpr uint64_t kFirstIterations = 1000;

}  // namespace

double measure_peak(const PeakKernel& kernel, const std::vector<int>& cpus, double seconds) {
  if (!(seconds >= 0.001 && seconds <= 60)) {
    throw std::invalid_argument("seconds is " + std::to_string(seconds) + "; allowed: 0.001 to 60");
  }
  std::atomic<uint64_t> sum{0};
  const auto run = [&](uint64_t iterations) {
    return run_together(cpus, [&](uint32_t) { sum += kernel.run(iterations); });
  };
  // Long enough that starting does not count, found by doubling: the first rounds also raise the clock.
  const double round_seconds = seconds / kRounds;
  uint64_t iterations = kFirstIterations;
  while (run(iterations) < round_seconds / 2) iterations *= 2;
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    best = std::max(best, static_cast<double>(iterations) / run(iterations));
  }
  return best * static_cast<double>(kernel.operations) * static_cast<double>(cpus.size());
}

}  // namespace moebius::probe
