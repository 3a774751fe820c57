// What steps over rows share: where an element lies, and rows divided among threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "kernels/dense/dense_threads.h"

namespace moebius::dense {

// Elements of a thread's smallest piece of work: a barrier costs as much as some thousand.
constexpr size_t kLeastElements = size_t{1} << 14;

inline size_t element_bytes(bool is_bfloat16) { return is_bfloat16 ? sizeof(uint16_t) : sizeof(float); }

inline const std::byte* at(const void* memory, size_t elements, bool is_bfloat16) {
  return static_cast<const std::byte*>(memory) + elements * element_bytes(is_bfloat16);
}

inline std::byte* at(void* memory, size_t elements, bool is_bfloat16) {
  return static_cast<std::byte*>(memory) + elements * element_bytes(is_bfloat16);
}

inline PageType page_type(const PageStorage& storage, bool is_bfloat16) {
  if (storage.is_float8) return PageType::kFloat8;
  return is_bfloat16 ? PageType::kBFloat16 : PageType::kFloat32;
}

inline size_t page_element_bytes(const PageStorage& storage, bool is_bfloat16) {
  return storage.is_float8 ? 1 : element_bytes(is_bfloat16);
}

// Copies activations to a page, in its type.
inline void store_in_page(const RowKernels& kernels, bool is_bfloat16, bool is_float8, float scale, const void* values,
                          std::byte* target, uint32_t count) {
  if (is_float8) {
    kernels.encode_float8({is_bfloat16, values, scale, reinterpret_cast<uint8_t*>(target), count});
  } else {
    std::memcpy(target, values, count * element_bytes(is_bfloat16));
  }
}

// run(row, worker) for every row, in pieces of at least kLeastElements where rows have `row_elements`.
template <class Run>
void for_rows(DenseThreads& threads, uint32_t num_rows, size_t row_elements, Run run) {
  const std::lock_guard<std::mutex> lock(threads.call_mutex());
  const auto together = static_cast<uint32_t>(std::max<size_t>(1, kLeastElements / std::max<size_t>(row_elements, 1)));
  threads.pool().parallel_for((num_rows + together - 1) / together, [&](uint32_t task, uint32_t worker) {
    const uint32_t end = std::min((task + 1) * together, num_rows);
    for (uint32_t row = task * together; row < end; ++row) run(row, worker);
  });
}

}  // namespace moebius::dense
