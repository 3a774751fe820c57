#include "kernels/topology/topology.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <set>
#include <sstream>
#include <stdexcept>

#include "kernels/topology/files.h"

namespace moebius::topology {

namespace {

// No machine has more; a corrupt "0-4000000000" must not allocate the world.
constexpr long kMaxCpu = 1 << 16;

std::vector<int> intersect(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<int> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both;
}

std::optional<std::vector<int>> read_cpu_list(const std::string& path) {
  const auto text = read_file(path);
  if (!text) return std::nullopt;
  return parse_cpu_list(*text, path);
}

uint64_t meminfo_bytes(const std::string& text, const std::string& key) {
  const auto value = find_value(text, key);
  return value ? std::strtoull(value->c_str(), nullptr, 10) * 1024 : 0;
}

NumaNode read_node(const std::string& directory, int id, const std::vector<int>& online) {
  NumaNode node{id, {}, 0, 0, true};
  node.cpus = read_cpu_list(directory + "/cpulist").value_or(std::vector<int>{});
  if (!online.empty()) node.cpus = intersect(node.cpus, online);
  const std::string meminfo = read_file(directory + "/meminfo").value_or("");
  const std::string prefix = "Node " + std::to_string(id) + " ";
  node.memory_total_bytes = meminfo_bytes(meminfo, prefix + "MemTotal");
  node.memory_free_bytes = meminfo_bytes(meminfo, prefix + "MemFree");
  return node;
}

std::vector<NumaNode> read_nodes(const std::string& sysfs_root, const std::vector<int>& online) {
  std::vector<NumaNode> nodes;
  const std::string root = sysfs_root + "/devices/system/node";
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(root, missing)) {
    const std::string name = entry.path().filename();
    if (name.size() < 5 || name.size() > 9 || name.compare(0, 4, "node") != 0) continue;
    if (!std::all_of(name.begin() + 4, name.end(), [](char c) { return c >= '0' && c <= '9'; })) continue;
    nodes.push_back(read_node(entry.path(), std::stoi(name.substr(4)), online));
  }
  std::sort(nodes.begin(), nodes.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return nodes;
}

std::vector<int> first_siblings(const std::string& sysfs_root, const std::vector<int>& cpus) {
  std::vector<int> leaders;
  for (int cpu : cpus) {
    const std::string path =
        sysfs_root + "/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list";
    const auto siblings = intersect(read_cpu_list(path).value_or(std::vector<int>{cpu}), cpus);
    if (siblings.empty() || siblings.front() == cpu) leaders.push_back(cpu);
  }
  return leaders;
}

std::vector<int> all_node_cpus(const std::vector<NumaNode>& nodes) {
  std::set<int> cpus;
  for (const NumaNode& node : nodes) cpus.insert(node.cpus.begin(), node.cpus.end());
  return {cpus.begin(), cpus.end()};
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text, const std::string& source) {
  std::set<int> cpus;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const char* const end = part.data() + part.size();
    long first = -1;
    auto parsed = std::from_chars(part.data(), end, first);
    long last = first;
    if (parsed.ec == std::errc() && parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
    }
    if (parsed.ec != std::errc() || parsed.ptr != end || first < 0 || last < first || last >= kMaxCpu) {
      throw std::runtime_error(source + ": '" + text + "' is not a CPU list like 0-3,8");
    }
    for (long cpu = first; cpu <= last; ++cpu) cpus.insert(int(cpu));
  }
  return {cpus.begin(), cpus.end()};
}

Topology Topology::detect(const std::string& sysfs_root, const std::string& proc_root,
                          const std::string& cgroup_root) {
  Topology topology;
  const auto online = read_cpu_list(sysfs_root + "/devices/system/cpu/online").value_or(std::vector<int>{});
  topology.nodes = read_nodes(sysfs_root, online);
  topology.allowed_cpus = online.empty() ? all_node_cpus(topology.nodes) : online;

  const std::string status_path = proc_root + "/self/status";
  const std::string status = read_file(status_path).value_or("");
  const auto limit = [&](const std::string& list, const std::string& source) {
    const auto cpus = parse_cpu_list(list, source);
    topology.allowed_cpus = topology.allowed_cpus.empty() ? cpus : intersect(topology.allowed_cpus, cpus);
  };
  if (const auto list = find_value(status, "Cpus_allowed_list")) limit(*list, status_path);
  const CgroupLimits limits = read_cgroup_limits(proc_root, cgroup_root);
  if (limits.cpus) limit(*limits.cpus, "cpuset.cpus.effective");
  if (topology.allowed_cpus.empty()) {
    throw std::runtime_error("no usable CPU found under " + sysfs_root + " and " + proc_root);
  }
  topology.cpu_quota = limits.cpu_quota;
  topology.core_leaders = first_siblings(sysfs_root, topology.allowed_cpus);
  if (const auto list = find_value(status, "Mems_allowed_list")) {
    const auto mems = parse_cpu_list(*list, status_path);
    for (NumaNode& node : topology.nodes) {
      node.memory_allowed = std::binary_search(mems.begin(), mems.end(), node.id);
    }
  }
  return topology;
}

std::vector<int> Topology::usable_cpus(int node) const {
  if (node == -1) return allowed_cpus;
  std::string known = "-1";
  for (const NumaNode& candidate : nodes) {
    if (candidate.id == node) return intersect(candidate.cpus, allowed_cpus);
    known += ", " + std::to_string(candidate.id);
  }
  throw std::invalid_argument("NUMA node " + std::to_string(node) + " does not exist; allowed are " + known);
}

uint32_t Topology::recommended_threads(int node) const {
  const size_t cores = intersect(usable_cpus(node), core_leaders).size();
  const size_t quota = cpu_quota ? size_t(std::floor(*cpu_quota)) : cores;
  return uint32_t(std::max<size_t>(1, std::min(cores, quota)));
}

std::vector<int> Topology::server_nodes() const {
  std::vector<int> ids;
  for (const NumaNode& node : nodes) {
    if (node.memory_total_bytes > 0 && node.memory_allowed && !usable_cpus(node.id).empty()) ids.push_back(node.id);
  }
  return ids.empty() ? std::vector<int>{-1} : ids;
}

}  // namespace moebius::topology
