// AVX-512 on machines without it, for tests (MOEBIUS_EMULATE_AVX512 in CMakeLists.txt): SIMDe's portable intrinsics, and
// here what SIMDe 0.7.4 lacks. Included before anything else of a file that is built for AVX-512.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/gfni.h>

namespace moebius::emulated {

template <class T, int kLanes>
struct Lanes {
  T at[kLanes];
  template <class Vector>
  static Lanes of(const Vector& vector) {
    static_assert(sizeof(Vector) == sizeof(Lanes));
    return std::bit_cast<Lanes>(vector);
  }
  template <class Vector>
  Vector to() const {
    return std::bit_cast<Vector>(*this);
  }
};

// Each lane of `from` by itself.
template <class To, class From, int kLanes, class Result, class Vector, class Function>
inline Result each(const Vector& vector, Function function) {
  const auto from = Lanes<From, kLanes>::of(vector);
  Lanes<To, kLanes> to;
  for (int i = 0; i < kLanes; ++i) to.at[i] = static_cast<To>(function(from.at[i]));
  return to.template to<Result>();
}

template <class To, class From, int kLanes, class Result, class Vector>
inline Result convert(const Vector& vector) {
  return each<To, From, kLanes, Result>(vector, [](From x) { return x; });
}

template <class T, int kLanes, class Vector, class Function>
inline T reduce(const Vector& vector, Function function) {
  auto lanes = Lanes<T, kLanes>::of(vector);
  // By halves, as the compiler's own functions add.
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes.at[i] = function(lanes.at[i], lanes.at[i + half]);
  }
  return lanes.at[0];
}

template <class T, int kLanes, class Vector, class Function>
inline uint64_t compare(const Vector& a, const Vector& b, Function function) {
  const auto left = Lanes<T, kLanes>::of(a), right = Lanes<T, kLanes>::of(b);
  uint64_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= uint64_t{function(left.at[i], right.at[i])} << i;
  return mask;
}

template <class T, int kLanes, class Vector>
inline Vector masked_load(uint64_t mask, const void* from) {
  Lanes<T, kLanes> lanes{};
  for (int i = 0; i < kLanes; ++i) {
    if (mask >> i & 1) std::memcpy(&lanes.at[i], static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
  }
  return lanes.template to<Vector>();
}

template <class T, int kLanes, class Vector>
inline void masked_store(void* to, uint64_t mask, const Vector& vector) {
  const auto lanes = Lanes<T, kLanes>::of(vector);
  for (int i = 0; i < kLanes; ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<char*>(to) + i * sizeof(T), &lanes.at[i], sizeof(T));
  }
}

// Of finite numbers, infinities and NaN, to nearest even.
inline uint16_t bfloat16_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  // Denormals count as zero.
  if ((bits & 0x7f800000) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace moebius::emulated

// What SIMDe lacks, by the names that sources call.
namespace moebius::emulated {

using V = __m512;
using I = __m512i;

inline __m512i cvtepu8_epi32(__m128i a) { return convert<int32_t, uint8_t, 16, I>(a); }
inline __m512i cvtepi8_epi32(__m128i a) { return convert<int32_t, int8_t, 16, I>(a); }
inline __m512i cvtepu16_epi32(__m256i a) { return convert<int32_t, uint16_t, 16, I>(a); }
inline __m256i cvtepi32_epi16(I a) { return convert<int16_t, int32_t, 16, __m256i>(a); }
inline __m128i cvtepi32_epi8(I a) { return convert<int8_t, int32_t, 16, __m128i>(a); }
inline __m512 cvtepi32_ps(I a) { return convert<float, int32_t, 16, V>(a); }
inline __m512i cvtps_epi32(V a) {
  return each<int32_t, float, 16, I>(a, [](float x) {
    return std::fabs(x) < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(x)) : INT32_MIN;
  });
}
inline __m512 cvtph_ps(__m256i a) {
  return each<float, uint16_t, 16, V>(a, [](uint16_t x) { return _cvtsh_ss(x); });
}
inline __m512i srai_epi32(I a, unsigned count) {
  return each<int32_t, int32_t, 16, I>(a, [=](int32_t x) { return x >> (count > 31 ? 31 : count); });
}
inline __m512i i32gather_epi32(I index, const void* base, int scale) {
  return each<int32_t, int32_t, 16, I>(index, [=](int32_t i) {
    int32_t value;
    std::memcpy(&value, static_cast<const char*>(base) + static_cast<ptrdiff_t>(i) * scale, sizeof value);
    return value;
  });
}
inline __mmask16 cmp_epu32_mask(I a, I b, int how) {
  return static_cast<__mmask16>(compare<uint32_t, 16>(a, b, [=](uint32_t x, uint32_t y) {
    const bool less = (how & 3) == _MM_CMPINT_EQ ? x == y : (how & 3) == _MM_CMPINT_LT ? x < y : x <= y;
    return less != ((how & 4) != 0);
  }));
}
inline __mmask16 testn_epi32_mask(I a, I b) {
  return static_cast<__mmask16>(compare<uint32_t, 16>(a, b, [](uint32_t x, uint32_t y) { return (x & y) == 0; }));
}
inline __mmask16 cmpeq_epi8_mask(__m128i a, __m128i b) {
  return static_cast<__mmask16>(compare<int8_t, 16>(a, b, [](int x, int y) { return x == y; }));
}
inline __mmask16 cmpeq_epi16_mask(__m256i a, __m256i b) {
  return static_cast<__mmask16>(compare<int16_t, 16>(a, b, [](int x, int y) { return x == y; }));
}
inline __mmask32 mask_cmpneq_epi16_mask(__mmask32 mask, I a, I b) {
  return mask & static_cast<__mmask32>(compare<int16_t, 32>(a, b, [](int x, int y) { return x != y; }));
}
// NaN (0x81), zeros (0x06), infinities (0x18).
inline __mmask16 fpclass_ps_mask(V a, int classes) {
  return static_cast<__mmask16>(compare<float, 16>(a, a, [=](float x, float) {
    const bool negative = std::signbit(x);
    if (x != x) return (classes & 0x81) != 0;
    if (x == 0) return (classes & (negative ? 4 : 2)) != 0;
    return std::isinf(x) && (classes & (negative ? 16 : 8)) != 0;
  }));
}
inline float mask_reduce_add_ps(__mmask16 mask, V a) {
  auto lanes = Lanes<float, 16>::of(a);
  for (int i = 0; i < 16; ++i) lanes.at[i] = mask >> i & 1 ? lanes.at[i] : 0.0f;
  return reduce<float, 16>(lanes, [](float x, float y) { return x + y; });
}
inline float reduce_add_ps(V a) { return mask_reduce_add_ps(0xffff, a); }
inline float reduce_max_ps(V a) {
  return reduce<float, 16>(a, [](float x, float y) { return x > y ? x : y; });
}
inline int reduce_add_epi32(I a) {
  return static_cast<int>(reduce<uint32_t, 16>(a, [](uint32_t x, uint32_t y) { return x + y; }));
}
inline int reduce_max_epi32(I a) {
  return reduce<int32_t, 16>(a, [](int32_t x, int32_t y) { return x > y ? x : y; });
}
inline void mask_storeu_ps(void* to, __mmask16 mask, V a) { masked_store<float, 16>(to, mask, a); }
inline void mask_storeu_epi32(void* to, __mmask16 mask, I a) { masked_store<int32_t, 16>(to, mask, a); }
inline __m512 maskz_loadu_ps(__mmask16 mask, const void* from) { return masked_load<float, 16, V>(mask, from); }
// The second operand's are the lower half.
inline __m512bh cvtne2ps_pbh(V high, V low) {
  const auto a = Lanes<float, 16>::of(low), b = Lanes<float, 16>::of(high);
  Lanes<uint16_t, 32> halves;
  for (int i = 0; i < 16; ++i) {
    halves.at[i] = bfloat16_bits(a.at[i]);
    halves.at[16 + i] = bfloat16_bits(b.at[i]);
  }
  return halves.to<__m512bh>();
}

}  // namespace moebius::emulated

#define _mm512_cvtepu8_epi32 moebius::emulated::cvtepu8_epi32
#define _mm512_cvtepi8_epi32 moebius::emulated::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 moebius::emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi16 moebius::emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 moebius::emulated::cvtepi32_epi8
#define _mm512_cvtepi32_ps moebius::emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 moebius::emulated::cvtps_epi32
#define _mm512_cvtph_ps moebius::emulated::cvtph_ps
#define _mm512_srai_epi32 moebius::emulated::srai_epi32
#undef _mm512_i32gather_epi32
#define _mm512_i32gather_epi32 moebius::emulated::i32gather_epi32
#undef _mm512_cmp_epu32_mask
#define _mm512_cmp_epu32_mask moebius::emulated::cmp_epu32_mask
#define _mm512_testn_epi32_mask moebius::emulated::testn_epi32_mask
#undef _mm_cmpeq_epi8_mask
#define _mm_cmpeq_epi8_mask moebius::emulated::cmpeq_epi8_mask
#define _mm256_cmpeq_epi16_mask moebius::emulated::cmpeq_epi16_mask
#define _mm512_mask_cmpneq_epi16_mask moebius::emulated::mask_cmpneq_epi16_mask
#undef _mm512_fpclass_ps_mask
#define _mm512_fpclass_ps_mask moebius::emulated::fpclass_ps_mask
#define _mm512_mask_reduce_add_ps moebius::emulated::mask_reduce_add_ps
#define _mm512_reduce_add_ps moebius::emulated::reduce_add_ps
#define _mm512_reduce_max_ps moebius::emulated::reduce_max_ps
#define _mm512_reduce_add_epi32 moebius::emulated::reduce_add_epi32
#define _mm512_reduce_max_epi32 moebius::emulated::reduce_max_epi32
#define _mm512_mask_storeu_ps moebius::emulated::mask_storeu_ps
#define _mm512_mask_storeu_epi32 moebius::emulated::mask_storeu_epi32
#define _mm512_maskz_loadu_ps moebius::emulated::maskz_loadu_ps
// SIMDe's alias of the first has the arguments of another function; commas of templates cut up the second's.
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8 simde_mm512_shuffle_epi8
#define _mm512_cvtne2ps_pbh moebius::emulated::cvtne2ps_pbh

// What a file's own flags would define.
#ifdef MOEBIUS_EMULATE_VBMI
#define __AVX512VBMI__ 1
#define __GFNI__ 1
#endif
