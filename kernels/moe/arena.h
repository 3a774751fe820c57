// Memory for packed weights: one mapping, in 2 MiB pages where the kernel grants them, on one NUMA node.
#pragma once

#include <cstddef>

namespace moebius {

class Arena {
 public:
  // Maps zeroed memory of at least `bytes`. numa_node >= 0 binds it there; -1 leaves it to the kernel.
  // Throws std::bad_alloc when the mapping fails. A refused binding is not an error: see bound().
  Arena(size_t bytes, int numa_node);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool bound() const { return bound_; }  // whether the requested node holds; true when none was asked for

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  bool bound_ = true;
};

}  // namespace moebius
