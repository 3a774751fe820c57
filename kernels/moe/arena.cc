#include "kernels/moe/arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <vector>

namespace moebius {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallPage = 4096;
constexpr int kMpolBind = 2;  // MPOL_BIND of <numaif.h>, which belongs to a library we do not need

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool bind_to_node(void* data, size_t bytes, int node) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(node) / kBits + 1, 0);
  mask[static_cast<size_t>(node) / kBits] |= 1ul << (static_cast<size_t>(node) % kBits);
  // The kernel reads maxnode - 1 bits.
  return syscall(SYS_mbind, data, bytes, kMpolBind, mask.data(), mask.size() * kBits + 1, 0) == 0;
}

}  // namespace

Arena::Arena(size_t bytes, int numa_node) {
  // Below half a huge page alignment would waste more than it brings.
  const size_t page = bytes >= kHugePage / 2 ? kHugePage : kSmallPage;
  bytes_ = round_up(bytes, page);
  mapping_bytes_ = bytes_ + (page == kHugePage ? kHugePage : 0);
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(mapping_), page));
  if (page == kHugePage) madvise(data_, bytes_, MADV_HUGEPAGE);  // advice: 4 KiB pages work too
  if (numa_node >= 0) bound_ = bind_to_node(data_, bytes_, numa_node);
}

Arena::~Arena() { munmap(mapping_, mapping_bytes_); }

}  // namespace moebius
