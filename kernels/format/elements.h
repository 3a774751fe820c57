// Single elements out of memory that is aligned to nothing. Not for files built for one instruction set.
#pragma once

#include <cstddef>
#include <cstring>

#include "kernels/format/numbers.h"
#include "kernels/format/weight_format.h"

namespace moebius {

template <class T>
T load_element(const void* base, ptrdiff_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * static_cast<ptrdiff_t>(sizeof(T)), sizeof(T));
  return value;
}

inline float load_scale(ScaleType type, const void* scales, ptrdiff_t index) {
  switch (type) {
    case ScaleType::kNone: return 1.0f;
    case ScaleType::kFloat32: return load_element<float>(scales, index);
    case ScaleType::kBFloat16: return decode_bfloat16(load_element<uint16_t>(scales, index));
    case ScaleType::kFloat16: return decode_float16(load_element<uint16_t>(scales, index));
    case ScaleType::kE8M0: return decode_e8m0(load_element<uint8_t>(scales, index));
    case ScaleType::kE4M3: return kFloat8Values[load_element<uint8_t>(scales, index)];
  }
  return 1.0f;
}

}  // namespace moebius
