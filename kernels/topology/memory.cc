#include "kernels/topology/memory.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>

namespace moebius::topology {

namespace {

constexpr int kMaxNodes = 1024;

// A bit per node, in the shape set_mempolicy and mbind want.
struct NodeMask {
  unsigned long words[kMaxNodes / (8 * sizeof(unsigned long))] = {};
  explicit NodeMask(int node) {
    if (node < 0 || node >= kMaxNodes) {
      throw std::invalid_argument("NUMA node " + std::to_string(node) + ": allowed 0.." +
                                  std::to_string(kMaxNodes - 1));
    }
    words[size_t(node) / (8 * sizeof(unsigned long))] |= 1ul << (size_t(node) % (8 * sizeof(unsigned long)));
  }
};

std::string advice(int error) {
  switch (error) {
    case EPERM:
      return " (containers forbid it by default: allow the system call in the seccomp profile or add CAP_SYS_NICE)";
    case ENOSYS:
      return " (this kernel has no NUMA support)";
    case EINVAL:
      return " (no such node or CPU, or the cpuset of this process excludes it)";
    default:
      return "";
  }
}

BindResult outcome(long status, const std::string& what) {
  if (status == 0) return {true, ""};
  const int error = errno;
  return {false, what + ": " + strerror(error) + advice(error)};
}

uintptr_t page_size() { return uintptr_t(sysconf(_SC_PAGESIZE)); }

}  // namespace

BindResult pin_thread(const std::vector<int>& cpus) {
  if (cpus.empty()) throw std::invalid_argument("pin_thread needs at least one CPU");
  if (*std::min_element(cpus.begin(), cpus.end()) < 0) throw std::invalid_argument("pin_thread: negative CPU number");
  const int count = *std::max_element(cpus.begin(), cpus.end()) + 1;
  const size_t bytes = CPU_ALLOC_SIZE(count);
  const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(count), [](cpu_set_t* p) { CPU_FREE(p); });
  CPU_ZERO_S(bytes, set.get());
  for (int cpu : cpus) CPU_SET_S(cpu, bytes, set.get());
  return outcome(sched_setaffinity(0, bytes, set.get()), "sched_setaffinity");
}

BindResult bind_memory(int node) {
  if (node == -1) return outcome(syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0), "set_mempolicy");
  const NodeMask mask(node);
  // The kernel takes the number of bits plus one.
  return outcome(syscall(SYS_set_mempolicy, MPOL_BIND, mask.words, kMaxNodes + 1),
                 "set_mempolicy to node " + std::to_string(node));
}

BindResult bind_range(void* address, size_t bytes, int node) {
  const NodeMask mask(node);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address) / page_size() * page_size();
  const uintptr_t end = reinterpret_cast<uintptr_t>(address) + bytes;
  if (end == begin) return {true, ""};
  return outcome(syscall(SYS_mbind, begin, end - begin, MPOL_BIND, mask.words, kMaxNodes + 1, MPOL_MF_MOVE),
                 "mbind to node " + std::to_string(node));
}

std::vector<int> page_nodes(const void* address, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address) / page_size() * page_size();
  const uintptr_t end = reinterpret_cast<uintptr_t>(address) + bytes;
  std::vector<void*> pages;
  for (uintptr_t page = begin; page < end; page += page_size()) pages.push_back(reinterpret_cast<void*>(page));
  std::vector<int> nodes(pages.size(), -ENOENT);
  // Without target nodes move_pages only reports.
  if (!pages.empty() && syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0) {
    throw std::system_error(errno, std::generic_category(), "move_pages");
  }
  return nodes;
}

}  // namespace moebius::topology
