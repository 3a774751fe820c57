// The CUDA names that doorbell.cu uses, on the host: one thread of the machine per thread of a block, blocks
// one after another (so block 0, which opens the gates, is always first, as on a GPU at the latest moment).
#include <sched.h>
#include <time.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define MBX_HOST
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static

struct Dim {
  unsigned x;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static thread_local Dim threadIdx;
static Dim blockIdx, blockDim, gridDim;
static std::barrier<>* block_barrier;

static inline void __syncthreads() {
  if (blockDim.x > 1) block_barrier->arrive_and_wait();
}
static inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static inline void __threadfence_system() { __threadfence(); }
template <typename T>
static T atomicAdd(T* word, T value) {
  return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}
template <typename T>
static T atomicExch(T* word, T value) {
  return __atomic_exchange_n(word, value, __ATOMIC_RELAXED);
}
static inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

typedef unsigned long long u64_;
static inline u64_ load_acquire_system(const u64_* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline u64_ load_acquire_device(const u64_* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline unsigned load_relaxed_system(const unsigned* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
static inline void store_release_system(u64_* word, u64_ value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline void store_release_system(unsigned* word, unsigned value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static inline void store_release_device(u64_* word, u64_ value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline u64_ global_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return u64_(now.tv_sec) * 1000000000u + u64_(now.tv_nsec);
}
static inline void nap(unsigned) { sched_yield(); }

template <typename Kernel>
static void run_grid(unsigned grid, unsigned block, Kernel kernel) {
  gridDim.x = grid;
  blockDim.x = block;
  for (unsigned b = 0; b < grid; ++b) {
    blockIdx.x = b;
    std::barrier<> barrier(block);
    block_barrier = &barrier;
    std::vector<std::thread> threads;
    for (unsigned t = 1; t < block; ++t) {
      threads.emplace_back([&, t] {
        threadIdx.x = t;
        kernel();
        barrier.arrive_and_drop();
      });
    }
    threadIdx.x = 0;
    kernel();
    barrier.arrive_and_drop();
    for (std::thread& thread : threads) thread.join();
  }
}
