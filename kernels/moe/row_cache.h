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

  // Where `kernel` prepares rows, gives `work` what it reads instead of them. Row i of the work is number id_of(i) among
  // the `total` of call number `call`. Valid until this function is called again.
  template <class IdOf>
  void prepare(const ProductKernel& kernel, uint32_t total, uint64_t call, IdOf&& id_of, ProductWork& work) {
    if (kernel.prepare_row == nullptr) return;
    const size_t stride = row_stride(kernel.prepared_row_bytes(*work.layout));
    const bool keeps = total <= kMostRows;
    pointers_.resize(work.num_rows);
    kept_.resize(kMostRows);
    buffer_.grow((keeps ? total : work.num_rows) * stride);
    for (uint32_t i = 0; i < work.num_rows; ++i) {
      const uint32_t place = keeps ? id_of(i) : i;
      std::byte* const target = buffer_.data() + place * stride;
      pointers_[i] = target;
      const Kept wanted{call, &kernel};
      if (keeps && kept_[place] == wanted) continue;
      kernel.prepare_row(*work.layout, work.rows[i], target);
      if (keeps) kept_[place] = wanted;
    }
    work.rows = pointers_.data();
    work.row_stride = 0;
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
