// Products of single rows with the packed panels of the experts that they chose: behind grouped_panels.cu, whose steps
// these are. A decode step of few rows waits for memory, and for one kernel after the other; so a block has little to
// do, all blocks of a row fit on the device at once, and their loads are under way together.
//
// A block's warps share the k of its columns, and add up what they find. All eight rows of a tensor-core instruction
// are the one row, or of down the rows of two choices in turn: panel P is of the first one's expert, Q of the second's.

constexpr int kLine = 128;

// A lane's four columns of a tile whose rows are all one, or alternate between two of which lanes of Q take the second.
static __device__ __forceinline__ float4 own_row(const float (&found)[2][4], int row) {
  return row ? make_float4(found[0][1], found[0][3], found[1][1], found[1][3])
             : make_float4(found[0][0], found[0][2], found[1][0], found[1][2]);
}

// The slot of the expert of a pair; -1: it is in none.
static __device__ __forceinline__ int slot_of(const int* ids, const int* slot_of_expert, int pair) {
  const int expert = load_latest(ids + pair);
  return expert < 0 ? -1 : load_latest(slot_of_expert + expert);
}

// Block (pair, strip of 16 channels, without a gate 32): intermediate bfloat16 [pairs, kIntermediateColumns] of `x`
// bfloat16 [rows, GateUp::kK]. Each brings `lines` cache lines of its expert's down into the device's cache.
extern "C" __global__ void __launch_bounds__(kWarps * 32)
    gate_up_pairs(const u8* x, const u8* slots, const int* ids, const int* slot_of_expert, u8* intermediate, int count,
                  int lines, float alpha, float limit) {
  __shared__ float4 found[kWarps][8];
  const int pair = blockIdx.x, strip = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  wait_for_previous();
  let_next_begin();
  const int slot = slot_of(ids, slot_of_expert, pair);
  if (slot < 0) return;
  const u8* expert = slots + u64(slot) * kExpertBytes;
  const u8* panel = expert + gate_up_at(strip, lane);
  const u8* rows[1] = {x + (u64(pair / kTopK) * GateUp::kK + (lane & 3) * 8) * 2};
  float total[1][2][4] = {};
  multiply<GateUp, 1, kWarps>(total, panel, rows, lane, warp, [&] {
    const u8* begin = expert + kDownAt + u64(strip) * lines * kLine;
    for (int line = threadIdx.x; line < lines; line += kWarps * 32) bring_line(begin + line * kLine);
  });
  if ((lane & 3) == 0) found[warp][lane >> 2] = own_row(total[0], 0);
  __syncthreads();
  if (warp > 0) return;
  float4 sum = found[0][lane >> 2];
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
    const float4 more = found[other][lane >> 2];
    sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
  }
  float columns[2][4] = {{sum.x, 0, sum.y, 0}, {sum.z, 0, sum.w, 0}};
  const int2 own = {lane & 3 ? count : pair, count};
  write_activations(columns, panel, own, strip, lane, intermediate, count, alpha, limit,
                    [](int channel) { return channel; });
}

// What is added to before: nothing, or `partial` in one of two types.
struct Nothing {};
struct Float32 {
  float value;
};
struct Bfloat16 {
  unsigned short bits;
};
static __device__ __forceinline__ float value_of(const Nothing*, u64) { return 0; }
static __device__ __forceinline__ float value_of(const Float32* values, u64 at) { return values[at].value; }
static __device__ __forceinline__ float value_of(const Bfloat16* values, u64 at) {
  return __uint_as_float(u32(values[at].bits) << 16);
}

constexpr int kTwos = (kTopK + 1) / 2;  // pairs of choices, one for each warp
constexpr int kShares = kTwos < kDownWarps ? kDownWarps / kTwos : 1;  // warps that share their k

// Block (row, panel of 16 columns): result float32 [rows, kHidden] = partial + the sum of weight * product over the
// row's choices. Choices and panels are read before `gate_up_pairs` ends: it waited for the kernel that wrote the former.
template <class Partial>
static __device__ __forceinline__ void down_of_row(const u8* intermediate, const u8* slots, const int* ids,
                                                   const int* slot_of_expert, const float* weights,
                                                   const Partial* partial, float* result) {
  __shared__ float found[kShares][2 * kTwos][16];
  __shared__ int chosen[2 * kTwos];
  __shared__ float factors[2 * kTwos];
  const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int two = warp % kTwos, share = warp / kTwos, second = lane >> 4;
  const int choice = 2 * two + second, pair = row * kTopK + choice;
  const int own = choice < kTopK ? slot_of(ids, slot_of_expert, pair) : -1;
  const int other = other_panel(own);
  // Of two experts one may be in no slot: then its lanes read the other's panel, and count for nothing.
  const int slot = own < 0 ? other : own;
  if (share == 0 && (lane & 15) == 0) {
    chosen[choice] = own;
    factors[choice] = choice < kTopK ? load_latest(weights + pair) : 0;
  }
  float total[1][2][4] = {};
  if (slot >= 0) {
    const u8* panel = slots + u64(slot) * kExpertBytes + kDownAt + u64(blockIdx.y) * Down::kPanelBytes;
    // Row lane / 4 of the tile: the first choice's where that is even, else the second's.
    const int of = 2 * two + (lane >> 2 & 1), known = row * kTopK + (of < kTopK ? of : kTopK - 1);
    const u8* rows[1] = {intermediate + (u64(known) * kIntermediateColumns + (lane & 3) * 8) * 2};
    multiply<Down, 1, kShares>(total, panel, rows, lane, share, [] {
      wait_for_previous();
      let_next_begin();
    });
  } else {
    wait_for_previous();
    let_next_begin();
  }
  if ((lane & 3) == 0) {
    *reinterpret_cast<float4*>(&found[share][choice][(lane >> 2 & 3) * 4]) = own_row(total[0], second);
  }
  __syncthreads();
  const int column = threadIdx.x, feature = blockIdx.y * 16 + column;
  if (column >= 16 || feature >= kHidden) return;
  float sum = value_of(partial, u64(row) * kHidden + feature);
#pragma unroll
  for (int n = 0; n < kTopK; ++n) {
    const int from = chosen[n];
    float product = 0;
#pragma unroll
    for (int each = 0; each < kShares; ++each) product += found[each][n][column];
    if (from < 0) continue;
    const u8* panel = slots + u64(from) * kExpertBytes + kDownAt + u64(blockIdx.y) * Down::kPanelBytes;
    if constexpr (Down::kColumnScale) product *= reinterpret_cast<const float*>(panel + Down::kColumnScaleAt)[column];
    if constexpr (Down::kBias) product += reinterpret_cast<const float*>(panel + Down::kBiasAt)[column];
    sum += product * factors[n];
  }
  result[u64(row) * kHidden + feature] = sum;
}

#define DOWN(name, Partial)                                                                                          \
  extern "C" __global__ void __launch_bounds__(kTwos * kShares * 32)                                                 \
      name(const u8* intermediate, const u8* slots, const int* ids, const int* slot_of_expert, const float* weights, \
           const Partial* partial, float* result) {                                                                  \
    down_of_row(intermediate, slots, ids, slot_of_expert, weights, partial, result);                                 \
  }
DOWN(down_pairs, Nothing)
DOWN(down_pairs_float32, Float32)
DOWN(down_pairs_bfloat16, Bfloat16)
