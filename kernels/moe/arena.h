// Memory for packed weights: one mapping, in 2 MiB pages where the system grants them, on one NUMA node.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/pool/thread_pool.h"

namespace moebius {

constexpr size_t kHugePage = size_t{2} << 20;

// Bytes of 2 MiB pages reserved on the machine (hugetlbfs) and free; 0 when the system has none.
size_t free_reserved_bytes();

struct MemoryRange {
  const std::byte* data;
  size_t bytes;
};

// Bytes of the ranges in 2 MiB pages, transparent or reserved, as /proc/self/smaps tells now. The system counts by
// mapping and joins neighbouring ones: where a mapping holds more than the ranges, their share is an upper bound.
// Reads the page tables of the whole process, about 1 ms a GB of 4 KiB pages. 0 when the file can not be read.
size_t huge_page_bytes(const std::vector<MemoryRange>& ranges, const std::string& smaps = "/proc/self/smaps");

// Has the kernel take memory for [data, data + bytes) from one node, from now on. False: it refuses.
bool bind_to_node(void* data, size_t bytes, int node);

// Gives every page memory. Unlike a write it fails, with false, instead of killing the process when there is none.
bool populate(std::byte* data, size_t bytes);

// --- Memory for packed weights of one engine alone: one mapping, in 2 MiB pages where the system grants them, on one
// NUMA node.

class Arena {
 public:
  // Maps zeroed memory of at least `bytes`. numa_node >= 0 binds it there; -1 leaves it to the kernel. Takes
  // reserved huge pages (hugetlbfs) when enough of them are free, else asks for transparent ones.
  //
  // With a pool, its threads touch every page now, side by side: on their own node when nothing is bound, and the
  // load that follows meets no page faults. Without one, pages appear as they are written; only reserved huge
  // pages are always touched, since nothing but touching proves that the node has them.
  //
  // Throws std::bad_alloc when the mapping fails or memory runs out while touching it. A refused binding is not an
  // error: see bound().
  Arena(size_t bytes, int numa_node, ThreadPool* pool = nullptr);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool bound() const { return bound_; }  // whether the requested node holds; true when none was asked for

 private:
  bool map_reserved(int numa_node, ThreadPool* pool);
  void map(int numa_node);
  void unmap();
  bool touch(ThreadPool* pool) const;

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  bool bound_ = true;
};

}  // namespace moebius
