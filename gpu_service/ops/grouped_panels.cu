// Products of blocks of rows that share an expert with its packed panels, on tensor cores.
//
// Compiled at run time by NVRTC, after constants (grouped_panels.py) and the files that `SOURCES` there names: ACTIVATION_*, sizes,
// offsets, and `struct GateUp` and `struct Down`, which say how panels lie in memory (kernels/format/panel_layout.h).
// Tests compile the very same file with a host compiler, after a shim of what it takes from CUDA.

// Block (block of 8 kTiles pairs, kWarps strips of 16 channels, without a gate 32): intermediate bfloat16 [pairs,
// kIntermediateColumns], of `x` bfloat16 [rows, GateUp::kK]. `pairs`, `block_slots`: as `routing.place_pairs` writes.
template <int kTiles>
static __device__ __forceinline__ void gate_up(const u8* x, const u8* slots, const int* pairs, const int* block_slots,
                                               u8* intermediate, int count, float alpha, float limit) {
  const int slot = block_slots[blockIdx.x], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int strip = blockIdx.y * kWarps + warp;
  if (slot < 0 || strip >= kGateUpStrips) return;
  const u8* panel = slots + u64(slot) * kExpertBytes + gate_up_at(strip, lane);
  const int* own = pairs + blockIdx.x * 8 * kTiles;
  const u8* rows[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int pair = own[tile * 8 + (lane >> 2)];
    const u64 row = pair < count ? pair / kTopK : 0;
    rows[tile] = x + (row * GateUp::kK + (lane & 3) * 8) * 2;
  }
  float total[kTiles][2][4] = {};
  multiply<GateUp, kTiles, 1>(total, panel, rows, lane, 0, [] {});
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    write_activations(total[tile], panel, own_pairs(own + tile * 8, lane), strip, lane, intermediate, count, alpha,
                      limit, [](int channel) { return channel; });
  }
}

// Block (block of 8 kTiles pairs, kWarps strips of 32 columns): outputs float32 [pairs, kHidden], not weighted.
template <int kTiles>
static __device__ __forceinline__ void down(const u8* intermediate, const u8* slots, const int* pairs,
                                            const int* block_slots, float* outputs, int count) {
  const int slot = block_slots[blockIdx.x], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int strip = blockIdx.y * kWarps + warp;
  if (slot < 0 || strip >= kDownStrips) return;
  const u8* panel = slots + u64(slot) * kExpertBytes + down_at(strip, lane);
  const int* own = pairs + blockIdx.x * 8 * kTiles;
  const u8* rows[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int pair = own[tile * 8 + (lane >> 2)];
    const u64 row = pair < count ? pair : own[0];
    rows[tile] = intermediate + (row * kIntermediateColumns + (lane & 3) * 8) * 2;
  }
  float total[kTiles][2][4] = {};
  multiply<Down, kTiles, 1>(total, panel, rows, lane, 0, [] {});
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    write_outputs(total[tile], panel, own_pairs(own + tile * 8, lane), strip, lane, outputs, count);
  }
}

#define KERNELS(kTiles)                                                                                               \
  extern "C" __global__ void __launch_bounds__(kWarps * 32)                                                           \
      gate_up_##kTiles(const u8* x, const u8* slots, const int* pairs, const int* block_slots, u8* intermediate,      \
                       int count, float alpha, float limit) {                                                         \
    gate_up<kTiles>(x, slots, pairs, block_slots, intermediate, count, alpha, limit);                                 \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kWarps * 32) down_##kTiles(                                            \
      const u8* intermediate, const u8* slots, const int* pairs, const int* block_slots, float* outputs, int count) { \
    down<kTiles>(intermediate, slots, pairs, block_slots, outputs, count);                                            \
  }
