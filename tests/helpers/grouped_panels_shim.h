// What grouped_panels.cu takes from CUDA, on the host: a thread of the machine for each lane of a block. Tensor-core
// instructions and exchanges between lanes wait for the warp; copies are complete at once.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define ON_HOST
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__ static

struct Dim {
  unsigned x, y;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static thread_local Dim threadIdx;
static Dim blockIdx;

// What the lanes of a warp show one another.
struct Warp {
  std::barrier<> barrier{32};
  unsigned words[32][8];
};
static std::vector<std::unique_ptr<Warp>> warps;
static Warp& own_warp() { return *warps[threadIdx.x / 32]; }

static float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static unsigned float_bits(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static unsigned bfloat16_bits(float value) {
  const unsigned bits = float_bits(value);
  return value != value ? 0x7FC0u : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float low_half(unsigned pair) { return __uint_as_float(pair << 16); }
static float high_half(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// mma.m16n8k16: a lane's registers hold rows lane / 4 and eight more of A, column lane / 4 of B, and k or columns
// from 2 (lane % 4) (PTX ISA, "Matrix fragments for mma.m16n8k16").
static void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  Warp& warp = own_warp();
  const unsigned lane = threadIdx.x & 31, mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp.words[lane], mine, sizeof mine);
  warp.barrier.arrive_and_wait();
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (unsigned part = 0; part < 2; ++part) {
      for (unsigned four = 0; four < 4; ++four) {
        const unsigned a = warp.words[row * 4 + four][2 * part + i / 2], b = warp.words[column * 4 + four][4 + part];
        sum[i] += low_half(a) * low_half(b) + high_half(a) * high_half(b);
      }
    }
  }
  warp.barrier.arrive_and_wait();
}
static unsigned fused_pairs(unsigned x, unsigned y, unsigned z) {
  const float low = low_half(x) * low_half(y) + low_half(z), high = high_half(x) * high_half(y) + high_half(z);
  return bfloat16_bits(low) | bfloat16_bits(high) << 16;
}
static unsigned rounded_pair(float low, float high) { return bfloat16_bits(low) | bfloat16_bits(high) << 16; }
static float from_half(unsigned bits) {
  const float sign = bits & 0x8000 ? -1.0f : 1.0f, mantissa = float(bits & 1023);
  const int exponent = bits >> 10 & 31;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}
static unsigned bytes_of(unsigned x, unsigned y, unsigned places) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) result |= unsigned(both >> 8 * (places >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
static float from_byte(unsigned code) {
  const float sign = code & 0x80 ? -1.0f : 1.0f, mantissa = float(code & 7);
  const int exponent = code >> 3 & 15;
  if ((code & 0x7F) == 0x7F) return NAN;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}
static unsigned from_float8(unsigned two) { return rounded_pair(from_byte(two & 255), from_byte(two >> 8)); }
static float other_panel(float value) {
  Warp& warp = own_warp();
  const unsigned lane = threadIdx.x & 31;
  warp.words[lane][0] = float_bits(value);
  warp.barrier.arrive_and_wait();
  const float other = __uint_as_float(warp.words[lane ^ 16][0]);
  warp.barrier.arrive_and_wait();
  return other;
}
template <typename T>
static T loaded(const uint8_t* at) {
  T value;
  memcpy(&value, at, sizeof value);
  return value;
}
static uint4 load_once(const uint8_t* at) { return loaded<uint4>(at); }
static uint4 load_16(const uint8_t* at) { return loaded<uint4>(at); }
static uint2 load_8(const uint8_t* at) { return loaded<uint2>(at); }
static unsigned load_4(const uint8_t* at) { return loaded<unsigned>(at); }
static uint4 load_row(const uint8_t* at) { return loaded<uint4>(at); }
static unsigned masked_or(unsigned x, unsigned mask, unsigned bits) { return (x & mask) | bits; }
static float exponential(float value) { return std::exp(value); }

template <typename Kernel>
static void run_grid(unsigned columns, unsigned rows, unsigned threads, Kernel kernel) {
  warps.clear();
  for (unsigned warp = 0; warp < threads / 32; ++warp) warps.push_back(std::make_unique<Warp>());
  for (blockIdx.y = 0; blockIdx.y < rows; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < columns; ++blockIdx.x) {
      std::vector<std::thread> lanes;
      for (unsigned thread = 0; thread < threads; ++thread) {
        lanes.emplace_back([&, thread] {
          threadIdx.x = thread;
          kernel();
        });
      }
      for (std::thread& lane : lanes) lane.join();
    }
  }
}
