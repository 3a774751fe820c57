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

// A whole decimal number > 0, or 0. Streams are not used for numbers: their facets live in libstdc++, and
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

// "0::/a/b" -> "/a/b"; inside a cgroup namespace the path may climb ("/../x"), which we can not follow.
std::string cgroup_path(const std::string& membership) {
  std::istringstream lines(membership);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, 3, "0::") != 0) continue;
    const std::string path = line.substr(3);
    return path == "/" || path.find("/..") != std::string::npos ? "" : path;
  }
  return "";
}

}  // namespace

CgroupLimits read_cgroup_limits(const std::string& proc_root, const std::string& cgroup_root) {
  CgroupLimits limits;
  std::string path = cgroup_path(read_file(proc_root + "/self/cgroup").value_or(""));
  for (;;) {
    const std::string group = cgroup_root + path;
    if (!limits.cpus) {
      limits.cpus = read_file(group + "/cpuset.cpus.effective");
      if (limits.cpus && limits.cpus->empty()) limits.cpus.reset();
    }
    if (const auto text = read_file(group + "/cpu.max"); text && !text->empty()) {
      const auto quota = parse_cpu_max(*text, group + "/cpu.max");
      if (quota) limits.cpu_quota = std::min(limits.cpu_quota.value_or(*quota), *quota);
    }
    if (path.empty()) return limits;
    path.erase(path.rfind('/'));
  }
}

}  // namespace moebius::topology
