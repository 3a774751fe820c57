#include "kernels/moe/arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <new>

#include "kernels/moe/huge_pages.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers lack it
#endif

namespace moebius {
namespace {

constexpr size_t kSmallPage = 4096;
constexpr size_t kTouchBytes = size_t{32} << 20;  // a task of touch()
constexpr int kMpolBind = 2;  // MPOL_BIND of <numaif.h>, which belongs to a library we do not need
constexpr int kHugetlb2MiB = MAP_HUGETLB | (21 << 26);  // log2 of the page size from bit 26 (MAP_HUGE_SHIFT)

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool bind_to_node(void* data, size_t bytes, int node) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(node) / kBits + 1, 0);
  mask[static_cast<size_t>(node) / kBits] |= 1ul << (static_cast<size_t>(node) % kBits);
  // The kernel reads maxnode - 1 bits.
  return syscall(SYS_mbind, data, bytes, kMpolBind, mask.data(), mask.size() * kBits + 1, 0) == 0;
}

// Gives every page memory. Unlike a write it fails instead of killing the process when there is none.
bool populate(std::byte* data, size_t bytes) {
  int result;
  do {
    result = madvise(data, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  // A kernel that does not know the advice leaves the pages to whoever writes them first.
  return result == 0 || errno == EINVAL;
}

}  // namespace

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
