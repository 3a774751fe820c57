// Measures this machine: how fast threads together read memory, and compute in registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/isa/isa.h"
#include "kernels/testing/probe_kernels.h"

namespace moebius::probe {

// Runs work(i) on one new thread per entry of `cpus`, thread i pinned to cpus[i]; all begin once all are there.
// Returns the seconds from the first one's begin to the last one's end. Throws std::invalid_argument for an
// empty list, a negative cpu, or one that a thread can not be pinned to. `work` must not throw.
double run_together(const std::vector<int>& cpus, const std::function<void(uint32_t)>& work);

// --- The probes that a level may run.

// The widest loads at or below `isa`, which supported_isas() must list.
const ReadKernel& read_kernel(Isa isa);

// Compute units at or below `isa`, lowest level first; `isa` must be one that supported_isas() lists.
std::vector<PeakKernel> peak_kernels(Isa isa);

// The unit of a name. Throws std::invalid_argument listing the units this machine has.
PeakKernel peak_kernel(const std::string& name);

// --- How fast threads together can read memory that no cache holds.

struct ReadPattern {
  size_t block_bytes;     // 0: one contiguous slice per thread; else blocks in random order, handed out as threads
                          // become free
  size_t prefetch_bytes;  // distance of software prefetch; 0: none
  PrefetchHint hint;
};

class BandwidthProbe {
 public:
  // Maps `bytes`, rounded up, and lets each thread write the part it would read in contiguous slices, so that
  // pages lie on its node. huge_pages asks for 2 MiB pages, which is advice. `bytes` should be several times the
  // last-level cache. Throws std::invalid_argument for cpus that can not be used, or fewer bytes than cpus x 1 MiB;
  // std::bad_alloc.
  BandwidthProbe(Isa isa, std::vector<int> cpus, size_t bytes, bool huge_pages);
  ~BandwidthProbe();
  BandwidthProbe(const BandwidthProbe&) = delete;
  BandwidthProbe& operator=(const BandwidthProbe&) = delete;

  size_t bytes() const { return bytes_; }

  // Bytes per second of the best of `passes` passes over all bytes. Throws std::invalid_argument for a block size
  // that is not a multiple of kReadStep or above 1 MiB, a distance that is not a multiple of kReadStep or is
  // longer than a block, or no passes.
  double measure(const ReadPattern& pattern, uint32_t passes);

 private:
  double pass_contiguous(const ReadPattern& pattern);
  double pass_blocks(const ReadPattern& pattern, const std::vector<uint32_t>& order);
  void check(const ReadPattern& pattern, uint32_t passes) const;

  const ReadKernel& kernel_;
  std::vector<int> cpus_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  size_t slice_bytes_ = 0;  // of one thread
  std::byte* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  uint64_t sum_ = 0;        // of everything read, so that nothing is left out
};

// --- What the compute units of some cpus give when operands never leave the registers.

// Operations (multiplications and additions) per second that one pinned thread per cpu does together; best of
// several rounds that last about `seconds` together. Throws std::invalid_argument for cpus that can not be used
// or seconds outside 0.001 to 60.
double measure_peak(const PeakKernel& kernel, const std::vector<int>& cpus, double seconds);

}  // namespace moebius::probe
