// Which CPUs and memory nodes the machine has and which of them this process may use, read from sysfs,
// procfs and cgroupfs under injectable roots. Nothing here assumes that the process owns the machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moebius::topology {

// Filled by Topology::detect from /sys/devices/system/node/node<id>.
struct NumaNode {
  int id;
  std::vector<int> cpus;        // ascending, online ones; empty for memory-only nodes
  uint64_t memory_total_bytes;  // 0 for CPU-only nodes
  uint64_t memory_free_bytes;
  bool memory_allowed;          // whether the process's cpuset lets it allocate here
};

struct Topology {
  std::vector<NumaNode> nodes;      // ascending ids; empty when the kernel has no NUMA support
  std::vector<int> allowed_cpus;    // ascending: online, in the affinity mask and in the cgroup cpuset
  std::optional<double> cpu_quota;  // CPUs' worth of time, smallest along the cgroup path; empty: unlimited
  std::vector<int> core_leaders;    // of allowed_cpus, the first of each physical core

  // Missing files mean "no such limit"; malformed ones throw std::runtime_error naming the file.
  static Topology detect(const std::string& sysfs_root = "/sys", const std::string& proc_root = "/proc",
                         const std::string& cgroup_root = "/sys/fs/cgroup");

  // Allowed CPUs of the node, or all allowed ones for -1. Throws std::invalid_argument for an id that does
  // not exist (naming those that do); may be empty for memory-only nodes.
  std::vector<int> usable_cpus(int node = -1) const;

  // Threads that can run at once there: one per physical core (a hyper-thread adds no memory bandwidth),
  // no more than the quota's whole CPUs, at least 1.
  uint32_t recommended_threads(int node = -1) const;

  // Nodes where an expert server makes sense: CPUs and memory both usable. {-1} when no node qualifies.
  std::vector<int> server_nodes() const;
};

// "0-3,8,10-11" -> ascending CPUs; empty text -> none. `source` names the file in errors.
std::vector<int> parse_cpu_list(const std::string& text, const std::string& source);

}  // namespace moebius::topology
