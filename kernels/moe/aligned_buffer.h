// Scratch that grows to the largest call so far and is never given back in between.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

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

}  // namespace moebius
