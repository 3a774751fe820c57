// How much memory really lies in 2 MiB pages: the system may grant fewer than were asked for.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace moebius {

constexpr size_t kHugePage = size_t{2} << 20;

// Bytes of 2 MiB pages reserved on the machine (hugetlbfs) and free; 0 when the system has none.
size_t free_reserved_bytes();

struct MemoryRange {
  const std::byte* data;
  size_t bytes;
};

// Bytes of the ranges in 2 MiB pages, transparent or reserved, as /proc/self/smaps tells now. The system counts by
// mapping and joins neighbouring ones: where a mapping holds more than the ranges, their share is an upper bound.
// Reads the page tables of the whole process, about 1 ms a GB of 4 KiB pages. 0 when the file can not be read.
size_t huge_page_bytes(const std::vector<MemoryRange>& ranges, const std::string& smaps = "/proc/self/smaps");

}  // namespace moebius
