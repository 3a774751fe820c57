// Products of many rows of an expert with its packed panels, by Hopper's warpgroup instructions.
//
// What grouped_panels.cu says of weights and of a lane's k holds here as well: four warps' operands of mma.m16n8k16 are
// those of wgmma.m64nNk16 with A in registers. Rows, the matrix B, are in shared memory, 64 k of kRows at a time, in
// the layout of 128-byte swizzles (PTX ISA, "Shared memory matrix layout"): chunk c of row r at chunk c ^ r % 8. An
// instruction there takes k in the order of memory, so that rows lie permuted: see `place_of`.
//
// A block is two warpgroups, 256 columns, over the same rows; of 128 rows one fits into a multiprocessor's registers,
// of 64 two do (kMostRows, kBlocks). Each step of 32 k is decoded while the products of the step before are under way.
// Sums of all k stay in registers, so that scales and mins are applied to weights, which are rounded to bfloat16 once,
// as weights are that are unpacked ahead.

#ifndef ON_HOST
// The block's shared memory: all of it is rows.
static __device__ __forceinline__ u32 shared_address() {
  extern __shared__ __align__(1024) u8 shared_rows[];
  return static_cast<u32>(__cvta_generic_to_shared(shared_rows));
}
static __device__ __forceinline__ void copy_16(u32 shared, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
static __device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for a thread's own copies but the newest group's, and shows them to the tensor cores.
static __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group 1;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
// Brings bytes, whole sixteens, to the second cache.
static __device__ __forceinline__ void prefetch(const u8* at, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
static __device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
#define FOUR(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
static __device__ __forceinline__ void multiply_add_rows(float (&sum)[64], const u32 (&a)[4], u64 rows) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
      : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
static __device__ __forceinline__ void multiply_add_rows(float (&sum)[32], const u32 (&a)[4], u64 rows) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : SIXTEEN(0), SIXTEEN(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
static __device__ __forceinline__ void multiply_add_rows(float (&sum)[16], const u32 (&a)[4], u64 rows) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : SIXTEEN(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
#endif

// Rows of 128 bytes, eight of them each 1024, swizzled (PTX ISA, "Matrix descriptor format").
static __device__ __forceinline__ u64 descriptor(u32 shared) {
  return u64(1) << 62 | u64(1024 >> 4) << 32 | u64(1) << 16 | (shared & 0x3FFFF) >> 4;
}

constexpr int kStageK = 64, kStages = 4;
// Stages whose weights are brought to the second cache together, before those that precede them are read.
constexpr int kFar = 4;
constexpr int kStageBytes = kMostRows * kStageK * 2;

// Where k is in its row: of each 32 k, lane (k / 8) of four has eight, whose pair n belongs to instruction n / 2 and
// there, as registers of B do, to half n % 2.
static __device__ __forceinline__ int place_of(int k) {
  const int pair = k >> 1 & 3;
  return (k & ~31) + (pair >> 1) * 16 + (pair & 1) * 8 + (k >> 3 & 3) * 2 + (k & 1);
}

// Pairs of one of a lane's columns, scaled. `scale`, `minimum`: of the group that the lane's eight k belong to.
template <class Panel>
static __device__ __forceinline__ void scaled_column(u32 (&pairs)[4], const Step<Panel>& step, int column, int lane,
                                                     float scale, float minimum) {
  decode_column<Panel>(pairs, step, column, lane);
  if constexpr (Panel::kCode == CODE_BFLOAT16) {
    // Registers of an instruction under way must not be those that a load writes: times one.
#pragma unroll
    for (int n = 0; n < 4; ++n) pairs[n] = fused_pairs(pairs[n], kOnes, 0x80008000u);
  }
  if constexpr (Panel::kScale == SCALE_NONE && !Panel::kMins) return;
  // Scales that bfloat16 holds are one product; of others what it does not hold is a second one.
  constexpr bool kIsExact =
      !Panel::kProducts && !Panel::kPanelScale && Panel::kScale != SCALE_FLOAT32 && Panel::kScale != SCALE_FLOAT16;
  const u32 high = rounded_pair(scale, scale);
  const float rest = scale - __uint_as_float(high << 16);
  const u32 low = rounded_pair(rest, rest);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (Panel::kMins) {
      const float first = __uint_as_float(pairs[n] << 16), second = __uint_as_float(pairs[n] & 0xFFFF0000u);
      pairs[n] = rounded_pair(first * scale + minimum, second * scale + minimum);
    } else if constexpr (kIsExact) {
      pairs[n] = fused_pairs(pairs[n], high, 0x80008000u);
    } else {
      pairs[n] = fused_pairs(pairs[n], high, fused_pairs(pairs[n], low, 0x80008000u));
    }
  }
}

// A lane's operands of one step: [pair of columns][instruction].
struct Operands {
  u32 registers[2][2][4];
};

template <class Panel>
static __device__ __forceinline__ void decode_step(Operands& operands, const Step<Panel>& step, int lane) {
  constexpr int kGroups = Step<Panel>::kGroups;
  float scale[kGroups][4], minimum[kGroups][4];
#pragma unroll
  for (int each = 0; each < kGroups; ++each) group_of<Panel>(scale[each], minimum[each], step, each);
  const bool is_second = kGroups == 2 && (lane & 2);
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    const float own = is_second ? scale[kGroups - 1][column] : scale[0][column];
    const float least = !Panel::kMins ? 0 : is_second ? minimum[kGroups - 1][column] : minimum[0][column];
    u32 pairs[4];
    scaled_column<Panel>(pairs, step, column, lane, own, least);
#pragma unroll
    for (int n = 0; n < 4; ++n) operands.registers[column / 2][n / 2][n % 2 * 2 + column % 2] = pairs[n];
  }
}

// Adds to `sums`, [pair of columns][as wgmma's D], the products of a block's rows with the columns of a lane's panel.
// `rows`: the permuted rows; `offsets`: bytes to those that a thread copies, row (thread / 8) and each 32nd after it.
template <class Panel, int kRows>
static __device__ __forceinline__ void multiply_rows(float (&sums)[2][kRows / 2], const u8* panel, const u8* rows,
                                                     const u32 (&offsets)[kRows / 32], int lane) {
  // A lane has registers for more steps ahead where it has fewer sums, and the multiprocessor to itself.
  constexpr bool kFew = kRows < kMostRows, kNarrow = Panel::kBits <= 4;
  constexpr int kAll = Panel::kK / kStageK;
  constexpr int kAhead = kBlocks == 1 ? (kNarrow ? 4 : 2) * (kFew ? 2 : 1) : kNarrow && kFew ? 4 : 2;
  const int chunk = threadIdx.x & 7, first = threadIdx.x >> 3;
  const u32 shared = shared_address();
  const u32 target = shared + first * 128 + (chunk ^ (first & 7)) * 16;
  const auto bring = [&](int stage) {
    constexpr int kBytes = Panel::kBits * kStageK * 2;
    const int left = kAll - stage;
    if ((lane & 15) == 0 && left > 0) prefetch(panel + stage * kBytes, (left < kFar ? left : kFar) * kBytes);
  };
  const auto copy_stage = [&](int stage) {
    if (stage < kAll) {
#pragma unroll
      for (int i = 0; i < kRows / 32; ++i) {
        copy_16(target + stage % kStages * kStageBytes + i * 32 * 128, rows + offsets[i] + stage * 128 + chunk * 16);
      }
    }
    copies_end();
  };
  bring(0);
  Step<Panel> steps[kAhead];
#pragma unroll
  for (int part = 0; part < kAhead; ++part) {
    if (part < 2 * kAll) load<Panel>(steps[part], panel, part, lane);
  }
  copy_stage(0);
  copy_stage(1);
  Operands operands[2];
  for (int begin = 0; begin < kAll; begin += kAhead / 2) {
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ahead += 2) {
      const int stage = begin + ahead / 2;
      if (kAll % (kAhead / 2) != 0 && stage >= kAll) break;
      // All but the newest copies have come, of all threads; and what stage - 2 was read by has ended.
      wait_for_copies();
      __syncthreads();
      copy_stage(stage + 2);
      if (stage % kFar == 0) bring(stage + kFar);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int part = 2 * stage + half;
        decode_step<Panel>(operands[half], steps[ahead + half], lane);
        if (part + kAhead < 2 * kAll) load<Panel>(steps[ahead + half], panel, part + kAhead, lane);
        const u32 at = shared + stage % kStages * kStageBytes + half * 64;
        products_begin();
#pragma unroll
        for (int two = 0; two < 2; ++two) {
#pragma unroll
          for (int each = 0; each < 2; ++each) {
            multiply_add_rows(sums[two], operands[half].registers[two][each], descriptor(at + each * 32));
          }
        }
        products_end();
        wait_for_products<1>();
      }
    }
  }
  wait_for_products<0>();
}

// The bytes to the rows that a thread copies.
template <int kRows>
static __device__ __forceinline__ void rows_of(u32 (&offsets)[kRows / 32], const int* own, int count, int divisor,
                                               u32 row_bytes) {
#pragma unroll
  for (int i = 0; i < kRows / 32; ++i) {
    const int pair = own[i * 32 + (threadIdx.x >> 3)];
    offsets[i] = pair < count ? u32(pair / divisor) * row_bytes : 0;
  }
}

// Calls `write` with the sums of eight rows at a time, [pair of columns][column, row], and with the lane's rows of
// them, all of which are asked for at once.
template <int kRows, class Write>
static __device__ __forceinline__ void each_tile(const float (&sums)[2][kRows / 2], const int* own, int lane,
                                                 Write write) {
  int2 rows[kRows / 8];
#pragma unroll
  for (int tile = 0; tile < kRows / 8; ++tile) rows[tile] = own_pairs(own + tile * 8, lane);
#pragma unroll
  for (int tile = 0; tile < kRows / 8; ++tile) {
    float found[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) found[i / 4][i % 4] = sums[i / 4][tile * 4 + i % 4];
    write(found, rows[tile]);
  }
}

template <int kRows>
static __device__ __forceinline__ void gate_up(const u8* x, const u8* expert, const int* own, u8* intermediate,
                                               int count, float alpha, float limit) {
  const int lane = threadIdx.x & 31, strip = blockIdx.x * kWarps + (threadIdx.x >> 5);
  const u8* panel = expert + gate_up_at(strip < kGateUpStrips ? strip : kGateUpStrips - 1, lane);
  u32 offsets[kRows / 32];
  rows_of<kRows>(offsets, own, count, kTopK, GateUp::kK * 2);
  float sums[2][kRows / 2] = {};
  multiply_rows<GateUp, kRows>(sums, panel, x, offsets, lane);
  each_tile<kRows>(sums, own, lane, [&](float (&found)[2][4], int2 rows) {
    write_activations(found, panel, rows, strip, lane, intermediate, count, alpha, limit, place_of);
  });
}

template <int kRows>
static __device__ __forceinline__ void down(const u8* intermediate, const u8* expert, const int* own, float* outputs,
                                            int count) {
  const int lane = threadIdx.x & 31, strip = blockIdx.x * kWarps + (threadIdx.x >> 5);
  const u8* panel = expert + down_at(strip < kDownStrips ? strip : kDownStrips - 1, lane);
  u32 offsets[kRows / 32];
  rows_of<kRows>(offsets, own, count, 1, kIntermediateColumns * 2);
  float sums[2][kRows / 2] = {};
  multiply_rows<Down, kRows>(sums, panel, intermediate, offsets, lane);
  each_tile<kRows>(sums, own, lane, [&](float (&found)[2][4], int2 rows) {
    write_outputs(found, panel, rows, strip, lane, outputs, count);
  });
}

// Whether at most half of a block's rows are pairs: `count` follows the last one.
static __device__ __forceinline__ bool is_half(const int* own, int count) { return own[kMostRows / 2] >= count; }

// Block (kWarps strips of 16 channels, without a gate 32; block of kMostRows pairs): intermediate bfloat16 [pairs,
// kIntermediateColumns], permuted, of `x` bfloat16 [rows, GateUp::kK], permuted.
extern "C" __global__ void __launch_bounds__(kWarps * 32, kBlocks)
    gate_up_many(const u8* x, const u8* slots, const int* pairs, const int* block_slots, u8* intermediate, int count,
                 float alpha, float limit) {
  const int slot = block_slots[blockIdx.y], *own = pairs + blockIdx.y * kMostRows;
  if (slot < 0) return;
  const u8* expert = slots + u64(slot) * kExpertBytes;
  if (is_half(own, count)) {
    gate_up<kMostRows / 2>(x, expert, own, intermediate, count, alpha, limit);
  } else {
    gate_up<kMostRows>(x, expert, own, intermediate, count, alpha, limit);
  }
}

// Block (kWarps strips of 32 columns; block of kMostRows pairs): outputs float32 [pairs, kHidden], not weighted, of
// permuted `intermediate`.
extern "C" __global__ void __launch_bounds__(kWarps * 32, kBlocks)
    down_many(const u8* intermediate, const u8* slots, const int* pairs, const int* block_slots, float* outputs,
              int count) {
  const int slot = block_slots[blockIdx.y], *own = pairs + blockIdx.y * kMostRows;
  if (slot < 0) return;
  const u8* expert = slots + u64(slot) * kExpertBytes;
  if (is_half(own, count)) {
    down<kMostRows / 2>(intermediate, expert, own, outputs, count);
  } else {
    down<kMostRows>(intermediate, expert, own, outputs, count);
  }
}

// Thread (eight k of a row): `permuted` holds what `x`, of `chunks` such eights, has in the order of `place_of`.
extern "C" __global__ void __launch_bounds__(kWarps * 32) permute(const u8* x, u8* permuted, int chunks) {
  const int chunk = blockIdx.x * kWarps * 32 + threadIdx.x;
  if (chunk >= chunks) return;
  // The pair n that each of four lanes has.
  const u32* from = reinterpret_cast<const u32*>(x + u64(chunk >> 2) * 64 + (chunk & 3) * 4);
  *reinterpret_cast<uint4*>(permuted + u64(chunk) * 16) = make_uint4(from[0], from[4], from[8], from[12]);
}
