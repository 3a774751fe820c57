// Number formats of weights and scales -> float32, exactly, and back; elements of unaligned memory. Not for files built
// for one instruction set.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/format/weight_format.h"

namespace moebius {

inline float decode_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline uint16_t encode_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// IEEE 754 binary16, subnormals, infinities and NaN included.
inline float decode_float16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000U} << 16;
  const uint32_t magnitude = bits & 0x7fffU;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
  // The exponent's bias changes from 15 to 127; the product also normalises subnormals.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
}

// Rounds to nearest, ties to even: infinite from 65520 on; a NaN stays a NaN.
inline uint16_t encode_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000U) return static_cast<uint16_t>(sign | 0x7c00);
  // Below 2^-14 the step is 2^-24, which is the step of float32 at 0.5.
  if (magnitude < 0x38800000U) {
    const float stepped = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(stepped) - 0x3f000000U));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112U << 10)));
}

// OCP 8-bit floating point e4m3fn: bias 7, no infinity, NaN at 0x7f and 0xff.
constexpr float decode_float8_slowly(uint32_t bits) {
  const uint32_t exponent = bits >> 3 & 15;
  const uint32_t mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000U | (bits & 0x80) << 24);
  float value = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f : static_cast<float>(8 + mantissa) * 0x1p-10f;
  for (uint32_t i = 0; i < exponent; ++i) value *= 2;
  return (bits & 0x80) != 0 ? -value : value;
}

constexpr std::array<float, 256> make_float8_values() {
  std::array<float, 256> values{};
  for (uint32_t bits = 0; bits < 256; ++bits) values[bits] = decode_float8_slowly(bits);
  return values;
}

inline constexpr std::array<float, 256> kFloat8Values = make_float8_values();

// OCP microscaling e2m1.
inline constexpr std::array<float, 16> kFloat4Values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// OCP microscaling e8m0: 2^(bits - 127), NaN at 255. 2^-127 is a subnormal float32.
inline float decode_e8m0(uint8_t bits) {
  if (bits == 0) return 0x1p-127f;
  return std::bit_cast<float>(bits == 255 ? 0x7fc00000U : uint32_t{bits} << 23);
}

// --- Single elements out of memory that is aligned to nothing. Not for files built for one instruction set.

template <class T>
T load_element(const void* base, ptrdiff_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * static_cast<ptrdiff_t>(sizeof(T)), sizeof(T));
  return value;
}

// Scales that are products, in the form of sources: words with the factor in the low half, the whole number in the byte
// above it.
inline float decode_product_word(uint32_t word) {
  return decode_float16(static_cast<uint16_t>(word)) * static_cast<float>(static_cast<int8_t>(word >> 16));
}

// Of a panel or a source, unless it is a product.
inline float load_scale(ScaleType type, const void* scales, ptrdiff_t index) {
  switch (type) {
    case ScaleType::kNone: return 1.0f;
    case ScaleType::kFloat32: return load_element<float>(scales, index);
    case ScaleType::kBFloat16: return decode_bfloat16(load_element<uint16_t>(scales, index));
    case ScaleType::kFloat16: return decode_float16(load_element<uint16_t>(scales, index));
    case ScaleType::kE8M0: return decode_e8m0(load_element<uint8_t>(scales, index));
    case ScaleType::kE4M3: return kFloat8Values[load_element<uint8_t>(scales, index)];
    case ScaleType::kProducts: break;  // of two places: panel_scale, decode_product_word
  }
  return 1.0f;
}

}  // namespace moebius
