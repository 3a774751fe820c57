// Rows as a kernel's prepare_row makes them, kept by one thread for all its tasks of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/moe/aligned_buffer.h"
#include "kernels/moe/row_buffer.h"
#include "kernels/product/product.h"

namespace moebius {

class RowCache {
 public:
  // In calls of more rows they are prepared anew for every product: keeping them would cost more than it saves.
  static constexpr uint32_t kMostRows = 256;

  // What `kernel` reads instead of rows[0..count), which are those of numbers ids[0..count) among the `total` of call
  // number `call`. Valid until this function is called again.
  const void* const* prepared(const ProductKernel& kernel, const PanelLayout& layout, const void* const* rows,
                              const uint32_t* ids, uint32_t count, uint32_t total, uint64_t call) {
    const size_t stride = row_stride(kernel.prepared_row_bytes(layout));
    const bool keeps = total <= kMostRows;
    pointers_.resize(count);
    kept_.resize(kMostRows);
    buffer_.grow((keeps ? total : count) * stride);
    for (uint32_t i = 0; i < count; ++i) {
      std::byte* const target = buffer_.data() + (keeps ? ids[i] : i) * stride;
      pointers_[i] = target;
      const Kept wanted{call, &kernel};
      if (keeps && kept_[ids[i]] == wanted) continue;
      kernel.prepare_row(layout, rows[i], target);
      if (keeps) kept_[ids[i]] = wanted;
    }
    return pointers_.data();
  }

 private:
  // What a place of the buffer was prepared for.
  struct Kept {
    uint64_t call = 0;
    const ProductKernel* kernel = nullptr;

    bool operator==(const Kept&) const = default;
  };

  AlignedBuffer buffer_;
  std::vector<Kept> kept_;
  std::vector<const void*> pointers_;
};

}  // namespace moebius
