// Counting values that are NaN or infinite, by their bits, so that no compiler flag can argue it away.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/moe/expert_backend.h"

namespace moebius {

template <class T, T kExponent>
uint64_t count_full_exponents(const T* values, size_t count) {
  uint64_t found = 0;
  for (size_t i = 0; i < count; ++i) found += (values[i] & kExponent) == kExponent;
  return found;
}

// Columns [begin, begin + count) of rows [rows, stride].
inline uint64_t count_nonfinite_block(DType dtype, const void* values, uint32_t rows, size_t stride, size_t begin,
                                      size_t count) {
  uint64_t found = 0;
  for (uint32_t row = 0; row < rows; ++row) {
    const size_t at = row * stride + begin;
    const auto* words = static_cast<const uint32_t*>(values) + at;
    const auto* halves = static_cast<const uint16_t*>(values) + at;
    switch (dtype) {
      case DType::kFloat32: found += count_full_exponents<uint32_t, 0x7f800000u>(words, count); break;
      case DType::kBFloat16: found += count_full_exponents<uint16_t, 0x7f80>(halves, count); break;
      case DType::kFloat16: found += count_full_exponents<uint16_t, 0x7c00>(halves, count); break;
    }
  }
  return found;
}

}  // namespace moebius
