// Scratch of the engine: memory that grows to the largest call so far, and rows in it that a kernel can read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace moebius {

// Raw memory, 64-byte aligned. Not for files built for one instruction set.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  ~AlignedBuffer() { release(); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  AlignedBuffer(AlignedBuffer&& other) noexcept { swap(other); }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  // At least `bytes` at data(). What was there before is lost when it has to grow, and all of it is zero then.
  // Throws std::bad_alloc.
  void grow(size_t bytes) {
    if (bytes <= bytes_) return;
    release();
    data_ = static_cast<std::byte*>(::operator new(bytes, kAlignment));
    bytes_ = bytes;
    std::memset(data_, 0, bytes);
  }

  std::byte* data() const { return data_; }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void release() {
    if (data_ != nullptr) ::operator delete(data_, kAlignment);
    data_ = nullptr;
    bytes_ = 0;
  }
  void swap(AlignedBuffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// --- Rows that a GEMM can read: equally spaced, 64-byte aligned, zero after what was written.

// Rows this many bytes apart meet in few sets of the first-level cache: twelve of them, read side by side, push each
// other out (measured on Zen 5: 30 % of the time of a bfloat16 GEMM with 12 or 24 rows).
inline bool rows_collide(size_t stride) { return stride % 2048 == 0; }

// Bytes between rows of `row_bytes` that GEMMs like.
inline size_t row_stride(size_t row_bytes) {
  const size_t stride = (row_bytes + 63) / 64 * 64;
  return rows_collide(stride) ? stride + 64 : stride;
}

class RowBuffer {
 public:
  // Room for `rows` rows of `row_bytes`, always the same number for one buffer. Bytes of a row that were not written
  // since the buffer grew are zero.
  void grow(size_t rows, size_t row_bytes) {
    if (rows <= pointers_.size()) return;
    rows = std::max(rows, pointers_.size() * 5 / 4);
    stride_ = row_stride(row_bytes);
    buffer_.grow(rows * stride_);
    pointers_.resize(rows);
    for (size_t i = 0; i < rows; ++i) pointers_[i] = row(i);
  }

  std::byte* row(size_t i) const { return buffer_.data() + i * stride_; }
  const void* const* pointers() const { return pointers_.data(); }
  size_t stride() const { return stride_; }  // bytes

 private:
  AlignedBuffer buffer_;
  std::vector<const void*> pointers_;
  size_t stride_ = 0;
};

}  // namespace moebius
