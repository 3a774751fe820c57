#include "kernels/moe/arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <new>
#include <optional>
#include <string_view>

#include "kernels/topology/files.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers lack it
#endif

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
  for (const std::string_view key : {"AnonHugePages:", "ShmemPmdMapped:", "Private_Hugetlb:", "Shared_Hugetlb:"}) {
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

namespace {

constexpr size_t kSmallPage = 4096;
constexpr size_t kTouchBytes = size_t{32} << 20;  // a task of touch()
constexpr int kMpolBind = 2;  // MPOL_BIND of <numaif.h>, which belongs to a library we do not need
constexpr int kHugetlb2MiB = MAP_HUGETLB | (21 << 26);  // log2 of the page size from bit 26 (MAP_HUGE_SHIFT)

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

bool bind_to_node(void* data, size_t bytes, int node) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(node) / kBits + 1, 0);
  mask[static_cast<size_t>(node) / kBits] |= 1ul << (static_cast<size_t>(node) % kBits);
  // The kernel reads maxnode - 1 bits.
  return syscall(SYS_mbind, data, bytes, kMpolBind, mask.data(), mask.size() * kBits + 1, 0) == 0;
}

bool populate(std::byte* data, size_t bytes) {
  int result;
  do {
    result = madvise(data, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  // A kernel that does not know the advice leaves the pages to the thread that writes them first.
  return result == 0 || errno == EINVAL;
}

Arena::Arena(size_t bytes, int numa_node, ThreadPool* pool) {
  // Below half a huge page alignment would waste more than it brings.
  bytes_ = round_up(bytes, bytes >= kHugePage / 2 ? kHugePage : kSmallPage);
  if (bytes_ >= kHugePage && map_reserved(numa_node, pool)) return;
  map(numa_node);
  if (pool == nullptr || touch(pool)) return;
  unmap();
  throw std::bad_alloc();
}

Arena::~Arena() { unmap(); }

// Reserved pages may lie on another node than the one we are bound to; only touching them tells.
bool Arena::map_reserved(int numa_node, ThreadPool* pool) {
  if (free_reserved_bytes() < bytes_) return false;
  mapping_bytes_ = bytes_;
  mapping_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | kHugetlb2MiB, -1, 0);
  if (mapping_ == MAP_FAILED) return false;
  data_ = static_cast<std::byte*>(mapping_);
  bound_ = numa_node < 0 || bind_to_node(data_, bytes_, numa_node);
  if (bound_ && touch(pool)) return true;
  unmap();
  return false;
}

void Arena::map(int numa_node) {
  const bool huge = bytes_ >= kHugePage;
  mapping_bytes_ = bytes_ + (huge ? kHugePage : 0);
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  data_ = reinterpret_cast<std::byte*>(
      round_up(reinterpret_cast<uintptr_t>(mapping_), huge ? kHugePage : kSmallPage));
  if (huge) madvise(data_, bytes_, MADV_HUGEPAGE);  // advice: 4 KiB pages work too
  bound_ = numa_node < 0 || bind_to_node(data_, bytes_, numa_node);
}

void Arena::unmap() { munmap(mapping_, mapping_bytes_); }

bool Arena::touch(ThreadPool* pool) const {
  if (pool == nullptr) return populate(data_, bytes_);
  std::atomic<bool> whole{true};
  pool->parallel_for(static_cast<uint32_t>(round_up(bytes_, kTouchBytes) / kTouchBytes), [&](uint32_t task, uint32_t) {
    const size_t begin = task * kTouchBytes;
    if (!populate(data_ + begin, std::min(kTouchBytes, bytes_ - begin))) whole.store(false);
  });
  return whole.load();
}

}  // namespace moebius
