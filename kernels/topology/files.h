// Small text files of sysfs, procfs and cgroupfs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace moebius::topology {

// Content without trailing white space; empty optional when the file can not be read.
std::optional<std::string> read_file(const std::string& path);

// Value of "<key> <value>" or "<key>: <value>" in a text of lines; empty optional when there is no such key.
std::optional<std::string> find_value(const std::string& text, const std::string& key);

// CPU limits of the cgroups this process is in: version 2, and the cpu controller of version 1. Empty when there is none.
struct CgroupLimits {
  std::optional<std::string> cpus;  // cpuset.cpus.effective of the nearest group that has it
  std::optional<double> cpu_quota;  // smallest cpu.max or cfs quota along the path to the root, in CPUs
};
CgroupLimits read_cgroup_limits(const std::string& proc_root, const std::string& cgroup_root);

}  // namespace moebius::topology
