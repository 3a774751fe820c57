#include "kernels/topology/files.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace moebius::topology {

std::optional<std::string> read_file(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) return std::nullopt;
  std::string text(std::istreambuf_iterator<char>(stream), {});
  if (stream.bad()) return std::nullopt;
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

std::optional<std::string> find_value(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t start = line.find_first_not_of(": \t", key.size());
    // "MemTotal" must not match "MemTotalX": a separator has to follow the key.
    if (start == key.size()) continue;
    return start == std::string::npos ? "" : line.substr(start);
  }
  return std::nullopt;
}

namespace {

// A whole decimal number > 0, or 0 for anything else. Streams are not used for numbers: their facets live in libstdc++, and
// a Python process may hold two of those.
int64_t positive(std::string_view digits) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return error == std::errc{} && end == digits.data() + digits.size() ? std::max<int64_t>(value, 0) : 0;
}

// "max 100000" or "150000 100000", microseconds -> CPUs.
std::optional<double> parse_cpu_max(const std::string& text, const std::string& source) {
  const std::string_view words = text;
  const size_t space = std::min(words.find(' '), words.size());
  const std::string_view quota = words.substr(0, space);
  if (quota == "max") return std::nullopt;
  const int64_t value = positive(quota);
  const int64_t period = positive(words.substr(std::min(space + 1, words.size())));
  if (value == 0 || period == 0) {
    throw std::runtime_error(source + ": '" + text + "' is not '<quota|max> <period>'");
  }
  return double(value) / double(period);
}

// Version 1 says the same in two files; -1 is no quota. Period 0 means there is no such file.
std::optional<double> read_cfs_quota(const std::string& group) {
  const int64_t quota = positive(read_file(group + "/cpu.cfs_quota_us").value_or(""));
  const int64_t period = positive(read_file(group + "/cpu.cfs_period_us").value_or(""));
  if (quota == 0 || period == 0) return std::nullopt;
  return double(quota) / double(period);
}

// Path of a line of /proc/self/cgroup: "0::/a/b" (version 2, `controller` empty) or "4:cpu,cpuacct:/a/b". Empty for
// the root, for no such line and for a path that climbs out of our cgroup namespace ("/../x"): we can not follow it.
std::string cgroup_path(const std::string& membership, std::string_view controller) {
  std::istringstream lines(membership);
  for (std::string line; std::getline(lines, line);) {
    const size_t names = line.find(':') + 1;
    const size_t path_begin = line.find(':', names) + 1;
    if (names == 0 || path_begin == 0) continue;
    const std::string controllers = "," + line.substr(names, path_begin - 1 - names) + ",";
    if (controllers.find("," + std::string(controller) + ",") == std::string::npos) continue;
    const std::string path = line.substr(path_begin);
    return path == "/" || path.find("/..") != std::string::npos ? "" : path;
  }
  return "";
}

void add_quota(CgroupLimits& limits, std::optional<double> quota) {
  if (quota) limits.cpu_quota = std::min(limits.cpu_quota.value_or(*quota), *quota);
}

// Calls visit(directory) for the group and every one above it.
template <class Visit>
void climb(const std::string& root, std::string path, Visit&& visit) {
  for (;;) {
    visit(root + path);
    if (path.empty()) return;
    path.erase(path.rfind('/'));
  }
}

}  // namespace

CgroupLimits read_cgroup_limits(const std::string& proc_root, const std::string& cgroup_root) {
  CgroupLimits limits;
  const std::string membership = read_file(proc_root + "/self/cgroup").value_or("");
  climb(cgroup_root, cgroup_path(membership, ""), [&](const std::string& group) {
    if (!limits.cpus) {
      limits.cpus = read_file(group + "/cpuset.cpus.effective");
      if (limits.cpus && limits.cpus->empty()) limits.cpus.reset();
    }
    const auto text = read_file(group + "/cpu.max");
    if (text && !text->empty()) add_quota(limits, parse_cpu_max(*text, group + "/cpu.max"));
  });
  for (const char* mount : {"/cpu", "/cpu,cpuacct"}) {
    climb(cgroup_root + mount, cgroup_path(membership, "cpu"),
          [&](const std::string& group) { add_quota(limits, read_cfs_quota(group)); });
  }
  return limits;
}

}  // namespace moebius::topology
