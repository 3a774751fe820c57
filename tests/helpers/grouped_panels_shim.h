// What the kernels of packed panels take from CUDA, on the host: a block's threads take turns, warp after warp. One that
// waits for its warp lets the next lane go on, one that waits for the block the next lane, after the last one the next
// warp: all lanes of a warp wait equally often.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define ON_HOST
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct Dim {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
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

static Dim threadIdx, blockIdx;

// A block's threads: their contexts, and what they show the others of their warp.
struct Ring {
  ucontext_t all_done, threads[256];
  bool has_ended[256];
  std::vector<char> stacks = std::vector<char>(256 << 18);
  std::function<void()> kernel;
  unsigned size, at;
  unsigned words[256][8];

  void wait() { leave_to(at % 32 == 31 ? at - 31 : at + 1); }
  void wait_for_block() { leave_to(at % 32 == 31 ? next_warp() : at + 1); }
  void end() {
    has_ended[at] = true;
    const unsigned next = at % 32 == 31 ? next_warp() : at + 1;
    if (has_ended[next]) setcontext(&all_done);
    begin(next);
    setcontext(&threads[next]);
  }
  void begin(unsigned thread) { at = thread, threadIdx.x = thread; }

 private:
  // The first lane of the next warp that has not ended; of none of them any.
  unsigned next_warp() const {
    unsigned first = (at - at % 32 + 32) % size;
    for (unsigned warps = size / 32; warps > 1 && has_ended[first]; --warps) first = (first + 32) % size;
    return first;
  }
  void leave_to(unsigned next) {
    const unsigned own = at;
    if (next == own) return;
    begin(next);
    swapcontext(&threads[own], &threads[next]);
    begin(own);
  }
};
static Ring ring;

static void run_thread() {
  ring.kernel();
  ring.end();
}

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
static void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                         unsigned b1) {
  const unsigned lane = ring.at & 31, first = ring.at - lane, mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(ring.words[ring.at], mine, sizeof mine);
  ring.wait();
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (unsigned part = 0; part < 2; ++part) {
      for (unsigned four = 0; four < 4; ++four) {
        const unsigned a = ring.words[first + row * 4 + four][2 * part + i / 2];
        const unsigned b = ring.words[first + column * 4 + four][4 + part];
        sum[i] += low_half(a) * low_half(b) + high_half(a) * high_half(b);
      }
    }
  }
  ring.wait();
}

// wgmma.m64nNk16: A and D as above in each warp; B by a descriptor with swizzles of 128 bytes, whose bits of an address
// from 16 are added modulo 8 without carry to those from 128 (PTX ISA, "Matrix descriptor format").
alignas(1024) static uint8_t shared_memory[1 << 16];
static unsigned shared_address() { return 0; }
static void copy_16(unsigned shared, const uint8_t* from) { memcpy(shared_memory + shared, from, 16); }
static void copies_end() {}
static void prefetch(const uint8_t*, int) {}
static void wait_for_copies() {}
static void __syncthreads() { ring.wait_for_block(); }
template <typename T>
static T load_latest(const T* at) {
  return *at;
}
static void bring_line(const uint8_t*) {}
static void wait_for_previous() {}
static void let_next_begin() {}
static void products_begin() {}
static void products_end() {}
template <int kPending>
static void wait_for_products() {}
template <size_t kSums>
static void multiply_add_rows(float (&sum)[kSums], const unsigned (&a)[4], uint64_t rows) {
  const unsigned lane = ring.at & 31, first = ring.at - lane;
  memcpy(ring.words[ring.at], a, sizeof a);
  ring.wait();
  const unsigned start = (rows & 0x3FFF) << 4, stride = (rows >> 32 & 0x3FFF) << 4;
  for (unsigned i = 0; i < kSums; ++i) {
    const unsigned row = lane / 4, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (unsigned pair = 0; pair < 8; ++pair) {
      const unsigned at = start + column / 8 * stride + column % 8 * 128 + pair * 4;
      unsigned b;
      memcpy(&b, shared_memory + (at ^ (at >> 7 & 7) << 4), 4);
      const unsigned held = ring.words[first + row * 4 + pair % 4][pair / 4 * 2 + i % 4 / 2];
      sum[i] += low_half(held) * low_half(b) + high_half(held) * high_half(b);
    }
  }
  ring.wait();
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
template <typename T>
static T other_panel(T value) {
  memcpy(ring.words[ring.at], &value, sizeof value);
  ring.wait();
  T other;
  memcpy(&other, ring.words[ring.at ^ 16], sizeof other);
  ring.wait();
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
static float quotient(float value, float divisor) { return value / divisor; }

static void run_grid(unsigned columns, unsigned rows, unsigned threads, const std::function<void()>& kernel) {
  ring.kernel = kernel, ring.size = threads;
  for (blockIdx.y = 0; blockIdx.y < rows; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < columns; ++blockIdx.x) {
      for (unsigned thread = 0; thread < threads; ++thread) {
        ring.has_ended[thread] = false;
        getcontext(&ring.threads[thread]);
        ring.threads[thread].uc_stack.ss_sp = ring.stacks.data() + (thread << 18);
        ring.threads[thread].uc_stack.ss_size = 1 << 18;
        ring.threads[thread].uc_link = nullptr;
        makecontext(&ring.threads[thread], run_thread, 0);
      }
      ring.begin(0);
      swapcontext(&ring.all_done, &ring.threads[0]);
    }
  }
}
