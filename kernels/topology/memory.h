// Pinning of threads and placing of memory through raw system calls (no libnuma).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace moebius::topology {

// Placement is an optimisation: where the system forbids it (seccomp in containers answers EPERM, kernels
// without NUMA ENOSYS) the caller goes on and reports the message.
struct BindResult {
  bool applied;
  std::string message;  // empty when applied; otherwise what was refused and how to allow it
};

// Restricts the calling thread (and threads it creates later) to `cpus`. Throws std::invalid_argument for
// an empty list or a negative CPU.
BindResult pin_thread(const std::vector<int>& cpus);

// Memory the calling thread touches first from now on comes from `node` only; -1 restores the default.
BindResult bind_memory(int node);

// Pages of [address, address + bytes) come from `node`; those already touched are moved.
BindResult bind_range(void* address, size_t bytes, int node);

// Node of each page of [address, address + bytes), or a negative errno (-ENOENT or -EFAULT: not touched yet). Throws
// std::system_error when the kernel refuses the query.
std::vector<int> page_nodes(const void* address, size_t bytes);

}  // namespace moebius::topology
