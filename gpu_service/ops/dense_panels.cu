// Products of rows with the packed panels of a dense layer, on tensor cores.
//
// Compiled at run time by NVRTC, after constants (dense_panels.py), panel_codes.cuh and panel_products.cuh. A dense
// layer has few columns beside all experts of a layer together, so that a block's warps share the k of 32 columns, and
// add up what they find, as in pair_panels.cu: then all of a GPU's processors have something to read.

// Adds a bias, bfloat16 or float32, to four columns of which `left` exist. `bias_bytes`: of an element; 0: there is
// none.
static __device__ __forceinline__ void add_bias(float (&values)[4], const u8* bias, int bias_bytes, int feature,
                                                int left) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (bias_bytes == 0 || i >= left) return;
    const u8* at = bias + u64(feature + i) * bias_bytes;
    const bool is_float = bias_bytes == 4;
    values[i] += is_float ? *reinterpret_cast<const float*>(at)
                          : __uint_as_float(u32(*reinterpret_cast<const unsigned short*>(at)) << 16);
  }
}

// Writes four columns of a row, of which `left` exist, in bfloat16.
static __device__ __forceinline__ void write_columns(u8* target, const float (&values)[4], int left) {
  const u32 first = rounded_pair(values[0], values[1]), second = rounded_pair(values[2], values[3]);
  if (left >= 4 && (reinterpret_cast<u64>(target) & 7) == 0) {
    *reinterpret_cast<uint2*>(target) = uint2{first, second};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 pair = i < 2 ? first : second;
    if (i < left) reinterpret_cast<unsigned short*>(target)[i] = static_cast<unsigned short>(pair >> 16 * (i & 1));
  }
}

// Block (block of 8 kTiles rows, strip of 32 columns): bfloat16 `output` [num_rows, num_features] of bfloat16 `x`
// [num_rows, Panel::kK], whose rows are `x_stride` and `output_stride` elements apart, those of `x` whole sixteens of
// bytes.
template <int kTiles>
static __device__ __forceinline__ void multiply_block(const u8* x, const u8* panels, const u8* bias, u8* output,
                                                      int num_rows, int num_features, int x_stride, int output_stride,
                                                      int bias_bytes) {
  __shared__ float4 found[kWarps][kTiles][2][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int begin = blockIdx.x * 8 * kTiles, last = (num_features - 1) / 16;
  const int wanted = 2 * blockIdx.y + (lane >> 4);
  const u8* panel = panels + u64(wanted < last ? wanted : last) * Panel::kPanelBytes;
  const u8* rows[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    // Rows past the last one are computed from that one, and not written.
    const int row = begin + tile * 8 + (lane >> 2);
    rows[tile] = x + (u64(row < num_rows ? row : num_rows - 1) * x_stride + (lane & 3) * 8) * 2;
  }
  float total[kTiles][2][4] = {};
  multiply<Panel, kTiles, kWarps>(total, panel, rows, lane, warp, [] {
    wait_for_previous();
    let_next_begin();
  });
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    finish<Panel>(total[tile], panel, lane);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float(&own)[2][4] = total[tile];
      found[warp][tile][row][lane] = make_float4(own[0][row], own[0][row + 2], own[1][row], own[1][row + 2]);
    }
  }
  __syncthreads();
  const int feature = blockIdx.y * 32 + (lane & 16) + (lane >> 2 & 3) * 4, left = num_features - feature;
  for (int item = warp; item < 2 * kTiles; item += kWarps) {
    const int tile = item >> 1, second = item & 1, row = begin + tile * 8 + (lane & 3) * 2 + second;
    if (row >= num_rows || left <= 0) continue;
    float4 sum = found[0][tile][second][lane];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) {
      const float4 more = found[other][tile][second][lane];
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    float values[4] = {sum.x, sum.y, sum.z, sum.w};
    add_bias(values, bias, bias_bytes, feature, left);
    write_columns(output + (u64(row) * output_stride + feature) * 2, values, left);
  }
}

#define KERNEL(kTiles)                                                                                            \
  extern "C" __global__ void __launch_bounds__(kWarps * 32)                                                       \
      dense_##kTiles(const u8* x, const u8* panels, const u8* bias, u8* output, int num_rows, int num_features,   \
                     int x_stride, int output_stride, int bias_bytes) {                                           \
    multiply_block<kTiles>(x, panels, bias, output, num_rows, num_features, x_stride, output_stride, bias_bytes); \
  }
KERNEL(1)
KERNEL(2)
KERNEL(4)
