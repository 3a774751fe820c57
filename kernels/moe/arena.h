// Memory for packed weights: one mapping, in 2 MiB pages where the system grants them, on one NUMA node.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/pool/thread_pool.h"

namespace moebius {

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
