#include "kernels/moe/huge_pages.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string_view>

#include "kernels/topology/files.h"

namespace moebius {
namespace {

// Leading number of `text`, which is advanced past it; empty when there is none. Not by streams: see files.cc.
std::optional<uint64_t> take_number(std::string_view& text, int base) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc{}) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

// "7f00a0000000-7f00c0000000 rw-p ...": the first line of a mapping. All others have a colon after a name.
bool parse_mapping(std::string_view line, uint64_t& begin, uint64_t& end) {
  const auto first = take_number(line, 16);
  if (!first || line.empty() || line.front() != '-') return false;
  line.remove_prefix(1);
  const auto second = take_number(line, 16);
  if (!second || line.empty() || line.front() != ' ') return false;
  begin = *first;
  end = *second;
  return true;
}

// "AnonHugePages:    204800 kB" -> bytes; 0 for any other line.
uint64_t huge_bytes_of(std::string_view line) {
  for (const std::string_view key : {"AnonHugePages:", "Private_Hugetlb:"}) {
    if (line.substr(0, key.size()) != key) continue;
    line.remove_prefix(std::min(line.find_first_not_of(' ', key.size()), line.size()));
    return take_number(line, 10).value_or(0) * 1024;
  }
  return 0;
}

uint64_t overlap(const std::vector<MemoryRange>& ranges, uint64_t begin, uint64_t end) {
  uint64_t bytes = 0;
  for (const MemoryRange& range : ranges) {
    const auto first = reinterpret_cast<uintptr_t>(range.data);
    const uint64_t last = first + range.bytes;
    if (first < end && begin < last) bytes += std::min<uint64_t>(last, end) - std::max<uint64_t>(first, begin);
  }
  return bytes;
}

}  // namespace

size_t free_reserved_bytes() {
  const auto text = topology::read_file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
  std::string_view digits = text ? std::string_view(*text) : std::string_view();
  return take_number(digits, 10).value_or(0) * kHugePage;
}

size_t huge_page_bytes(const std::vector<MemoryRange>& ranges, const std::string& smaps) {
  std::ifstream lines(smaps);
  uint64_t total = 0;
  uint64_t ours = 0;  // bytes of the current mapping that belong to the ranges
  uint64_t begin = 0;
  uint64_t end = 0;
  for (std::string line; std::getline(lines, line);) {
    if (parse_mapping(line, begin, end)) {
      ours = overlap(ranges, begin, end);
    } else if (ours > 0) {
      total += std::min(ours, huge_bytes_of(line));
    }
  }
  return total;
}

}  // namespace moebius
