// What a lane loads of packed panels, and how codes of each kind become pairs of bfloat16: first part of
// grouped_panels.cu and of warpgroup_panels.cu, which say what a lane's are.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kBase = 0x43004300u;  // 128.0 twice: after it a mantissa's last four bits are whole numbers
constexpr u32 kMinusBase = 0xC300C300u;
constexpr u32 kOnes = 0x3F803F80u;

#ifndef ON_HOST
// Weights, which are read once: not kept in the first cache. The compiler keeps these loads where they are.
static __device__ __forceinline__ uint4 load_once(const u8* at) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at));
  return value;
}
static __device__ __forceinline__ uint4 load_16(const u8* at) {
  uint4 value;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at));
  return value;
}
static __device__ __forceinline__ uint2 load_8(const u8* at) {
  uint2 value;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(at));
  return value;
}
static __device__ __forceinline__ u32 load_4(const u8* at) {
  u32 value;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}
// Rows were written by the kernel before: not through the path for what never changes.
static __device__ __forceinline__ uint4 load_row(const u8* at) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at));
  return value;
}
// What a kernel that runs beside this one has just written, or is about to write again: from no first cache.
static __device__ __forceinline__ int load_latest(const int* at) {
  int value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}
static __device__ __forceinline__ float load_latest(const float* at) {
  return __int_as_float(load_latest(reinterpret_cast<const int*>(at)));
}
static __device__ __forceinline__ void bring_line(const u8* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// Returns when all that was launched before is complete. Before it, only what no kernel is writing may be read.
static __device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may begin once all blocks have come here.
static __device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
static __device__ __forceinline__ void multiply_add(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two bfloat16 each: x * y + z.
static __device__ __forceinline__ u32 fused_pairs(u32 x, u32 y, u32 z) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}
// (x & mask) | bits, as one instruction: the compiler would make two.
static __device__ __forceinline__ u32 masked_or(u32 x, u32 mask, u32 bits) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
  return result;
}
// Bytes of x and y, numbered from 0 to 7, that the four lowest nibbles of `places` name.
static __device__ __forceinline__ u32 bytes_of(u32 x, u32 y, u32 places) {
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(places));
  return result;
}
static __device__ __forceinline__ u32 rounded_pair(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
static __device__ __forceinline__ float from_half(u32 bits) {
  float value;
  asm("{ .reg .b16 half; cvt.u16.u32 half, %1; cvt.f32.f16 %0, half; }" : "=f"(value) : "r"(bits));
  return value;
}
// Two e4m3fn in bfloat16.
static __device__ __forceinline__ u32 from_float8(u32 two) {
#if __CUDA_ARCH__ >= 890
  u32 halves;
  asm("{ .reg .b16 both; cvt.u16.u32 both, %1; cvt.rn.f16x2.e4m3x2 %0, both; }" : "=r"(halves) : "r"(two));
  return rounded_pair(from_half(halves & 0xFFFFu), from_half(halves >> 16));
#else
  // The exponent's bias is 7: bits set into place, and 2^120. The highest code is NaN.
  const u32 placed = bytes_of(two, 0, 0x1404);
  const u32 value = fused_pairs(masked_or(placed >> 4, 0x07F007F0u, placed & 0x80008000u), 0x7B807B80u, 0x80008000u);
  const u32 low_is_nan = (two & 0x7F) == 0x7F ? 0x7FC0u : 0, high_is_nan = (two & 0x7F00) == 0x7F00 ? 0x7FC00000u : 0;
  return value | low_is_nan | high_is_nan;
#endif
}
template <class T>
static __device__ __forceinline__ T other_panel(T value) {
  return __shfl_xor_sync(~0u, value, 16);
}
static __device__ __forceinline__ float exponential(float value) { return __expf(value); }
// To two units in the last place; a division takes several times as long.
static __device__ __forceinline__ float quotient(float value, float divisor) { return __fdividef(value, divisor); }
#endif

// Four scales as they are stored: 4, 8 or 16 bytes.
template <int kBytes>
struct Four;
template <>
struct Four<0> {
  __device__ __forceinline__ void load(const u8*) {}
};
template <>
struct Four<4> {
  u32 x;
  __device__ __forceinline__ void load(const u8* at) { x = load_4(at); }
};
template <>
struct Four<8> {
  uint2 x;
  __device__ __forceinline__ void load(const u8* at) { x = load_8(at); }
};
template <>
struct Four<16> {
  uint4 x;
  __device__ __forceinline__ void load(const u8* at) { x = load_16(at); }
};

// What a lane loads of one step: eight k of four columns, and what their groups say of them; one group or two.
template <class Panel>
struct Step {
  static constexpr int kGroups = Panel::kGroup == 16 ? 2 : 1;
  uint4 words[Panel::kLowBits / 4];
  uint4 high;  // Bits of a second plane.
  Four<Panel::kPanelScale ? 4 : 4 * Panel::kScaleBytes> scales[kGroups], mins[kGroups];  // Of products the factors.
  u32 whole[kGroups], whole_mins[kGroups], zeros[kGroups];
};

// Loads a lane's part of a step. `panel`: that of the lane's columns.
template <class Panel>
static __device__ __forceinline__ void load(Step<Panel>& step, const u8* panel, int part, int lane) {
  constexpr int kLines = Panel::kLowBits / 4, kGroups = Step<Panel>::kGroups;
  const int column = (lane >> 2 & 3) * 4;
  const u8* own = panel + part * (Panel::kBits * 64) + column * 4;
#pragma unroll
  for (int line = 0; line < kLines; ++line) {
    step.words[line] = load_once(own + ((lane & 3) * kLines + line) * 64);
  }
  if constexpr (Panel::kBits == 6) step.high = load_once(own + (4 + (lane >> 1 & 1)) * 64);
  if constexpr (Panel::kBits == 5) step.high = load_once(own + 4 * 64);
#pragma unroll
  for (int each = 0; each < kGroups; ++each) {
    // The second half of the last step may be padding, which has no group.
    const int wanted = kGroups == 2 ? 2 * part + each : part / Panel::kPartsOfGroup;
    const int group = kGroups == 2 && wanted >= Panel::kAllGroups ? Panel::kAllGroups - 1 : wanted;
    const int factors = Panel::kProducts ? group / Panel::kFactorGroups : group;
    const int scale_at = (Panel::kPanelScale ? group : factors * 16 + column) * Panel::kScaleBytes;
    const int whole_at = group * 16 + column;
    step.scales[each].load(panel + Panel::kScalesAt + scale_at);
    if constexpr (Panel::kMins) step.mins[each].load(panel + Panel::kMinsAt + scale_at);
    if constexpr (Panel::kZeros) step.zeros[each] = load_4(panel + Panel::kZerosAt + whole_at);
    if constexpr (Panel::kProducts) {
      step.whole[each] = load_4(panel + Panel::kScalesAt + Panel::kWholeAt + whole_at);
      if constexpr (Panel::kMins && !Panel::kJoined) {
        step.whole_mins[each] = load_4(panel + Panel::kMinsAt + Panel::kWholeAt + whole_at);
      }
    }
  }
}

template <class Panel>
static __device__ __forceinline__ void to_float(float (&scale)[4],
                                                const Four<Panel::kPanelScale ? 4 : 4 * Panel::kScaleBytes>& four) {
  if constexpr (Panel::kScale == SCALE_NONE) {
    scale[0] = scale[1] = scale[2] = scale[3] = 1;
  } else if constexpr (Panel::kPanelScale) {
    scale[0] = scale[1] = scale[2] = scale[3] = __uint_as_float(four.x);
  } else if constexpr (Panel::kScale == SCALE_FLOAT32) {
    scale[0] = __uint_as_float(four.x.x), scale[1] = __uint_as_float(four.x.y);
    scale[2] = __uint_as_float(four.x.z), scale[3] = __uint_as_float(four.x.w);
  } else if constexpr (Panel::kScale == SCALE_E8M0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 bits = four.x >> 8 * i & 255;
      // 2^-127 is no normal float32, and 255 means NaN.
      scale[i] = __uint_as_float(bits == 0 ? 0x00400000u : bits == 255 ? 0x7FC00000u : bits << 23);
    }
  } else if constexpr (Panel::kScale == SCALE_E4M3) {
    const u32 first = from_float8(four.x & 0xFFFFu), second = from_float8(four.x >> 16);
    scale[0] = __uint_as_float(first << 16), scale[1] = __uint_as_float(first & 0xFFFF0000u);
    scale[2] = __uint_as_float(second << 16), scale[3] = __uint_as_float(second & 0xFFFF0000u);
  } else if constexpr (Panel::kScale == SCALE_BFLOAT16) {
    scale[0] = __uint_as_float(four.x.x << 16), scale[1] = __uint_as_float(four.x.x & 0xFFFF0000u);
    scale[2] = __uint_as_float(four.x.y << 16), scale[3] = __uint_as_float(four.x.y & 0xFFFF0000u);
  } else {
    scale[0] = from_half(four.x.x & 0xFFFFu), scale[1] = from_half(four.x.x >> 16);
    scale[2] = from_half(four.x.y & 0xFFFFu), scale[3] = from_half(four.x.y >> 16);
  }
}

// Scales and mins of one of a step's groups, for a lane's four columns.
template <class Panel>
static __device__ __forceinline__ void group_of(float (&scale)[4], float (&minimum)[4], const Step<Panel>& step,
                                                int each) {
  to_float<Panel>(scale, step.scales[each]);
  if constexpr (Panel::kMins) to_float<Panel>(minimum, step.mins[each]);
  if constexpr (Panel::kProducts) {
    const u32 whole = step.whole[each];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int shift = 8 * i;
      scale[i] *= float(Panel::kJoined ? int(whole >> shift & 15) : int(whole << (24 - shift)) >> 24);
      if constexpr (Panel::kMins && Panel::kJoined) minimum[i] *= float(whole >> (shift + 4) & 15);
      if constexpr (Panel::kMins && !Panel::kJoined) {
        minimum[i] *= float(int(step.whole_mins[each] << (24 - shift)) >> 24);
      }
    }
  }
}

// Eight 4-bit places in the table of values: of four at a time a byte of the first eight values or of the last eight,
// the high and the low one, as pairs.
template <class Panel>
static __device__ __forceinline__ void look_up(u32 (&pairs)[4], u32 word) {
  u32 found[2][2];  // [even or odd k][high or low bytes]
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const u32 four = odd ? word >> 16 : word, places = four & 0x7777u, halves = masked_or(four >> 1, 0x4444u, 0x3210u);
    const u32 first_low = bytes_of(Panel::kLow0, Panel::kLow1, places);
    const u32 first_high = bytes_of(Panel::kHigh0, Panel::kHigh1, places);
    const u32 low = bytes_of(first_low, bytes_of(Panel::kLow2, Panel::kLow3, places), halves);
    const u32 high = bytes_of(first_high, bytes_of(Panel::kHigh2, Panel::kHigh3, places), halves);
    found[odd][0] = bytes_of(low, high, 0x5140), found[odd][1] = bytes_of(low, high, 0x7362);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) pairs[n] = bytes_of(found[0][n / 2], found[1][n / 2], n % 2 ? 0x7632 : 0x5410);
}

// Bits of a second plane of 5- or 6-bit codes, where pair n's belong: above the four of the first. `high`: moved to
// where the lane's begin.
template <class Panel>
static __device__ __forceinline__ u32 high_bits(u32 high, int n) {
  constexpr int kPlane = Panel::kBits - 4;
  // The four k of a byte that n / 2 names are in bits 0 and kPlane.
  const int from = n / 2 * 8 + n % 2 * kPlane;
  return (from > 4 ? high >> (from - 4) : high << (4 - from)) & (Panel::kBits == 6 ? 0x00300030u : 0x00100010u);
}

// Pairs of a column's eight codes in bfloat16: k 2 n and 2 n + 1 in pair n. `excess`: of integers of 4 to 6 bits, twice
// what they have too much, negative.
template <class Panel>
static __device__ __forceinline__ void decode(u32 (&pairs)[4], const u32 (&words)[Panel::kLowBits / 4], u32 high,
                                              u32 excess) {
  if constexpr (Panel::kCode == CODE_TABLE) look_up<Panel>(pairs, words[0]);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (Panel::kCode == CODE_BFLOAT16) {
      pairs[n] = words[n];
    } else if constexpr (Panel::kCode == CODE_FLOAT8) {
      pairs[n] = from_float8(words[n / 2] >> 16 * (n % 2) & 0xFFFFu);
    } else if constexpr (Panel::kCode == CODE_INT8) {
      // Each byte plus 128 in the mantissa of 2^23.
      const u32 four = words[n / 2] ^ 0x80808080u, first = 2 * (n % 2);
      const float low = __uint_as_float(bytes_of(four, 0x4B000000u, 0x7550u | first)) - 8388736.0f;
      pairs[n] = rounded_pair(low, __uint_as_float(bytes_of(four, 0x4B000000u, 0x7551u | first)) - 8388736.0f);
    } else if constexpr (Panel::kCode == CODE_FLOAT4) {
      // The exponent's bias is 1: bits set into place, and 2^126.
      const u32 sign = words[0] << (12 - 4 * n) & 0x80008000u;
      const u32 moved = n < 2 ? words[0] << (6 - 4 * n) : words[0] >> (4 * n - 6);
      pairs[n] = fused_pairs(masked_or(moved, 0x01C001C0u, sign), 0x7E807E80u, 0x80008000u);
    } else if constexpr (Panel::kCode == CODE_INTEGER) {
      const u32 above = Panel::kBits > 4 ? kBase | high_bits<Panel>(high, n) : kBase;
      pairs[n] = fused_pairs(masked_or(words[0] >> 4 * n, 0x000F000Fu, above), kOnes, excess);
    }
  }
}

static __device__ __forceinline__ u32 column_of(const uint4& four, int column) {
  return column == 0 ? four.x : column == 1 ? four.y : column == 2 ? four.z : four.w;
}

// Pairs of one of a lane's four columns.
template <class Panel>
static __device__ __forceinline__ void decode_column(u32 (&pairs)[4], const Step<Panel>& step, int column, int lane) {
  u32 words[Panel::kLowBits / 4], high = 0, excess = kMinusBase + Panel::kMiddle * 0x00010001u;
#pragma unroll
  for (int line = 0; line < Panel::kLowBits / 4; ++line) words[line] = column_of(step.words[line], column);
  if constexpr (Panel::kBits == 6) high = column_of(step.high, column) >> (lane & 1) * 4;
  if constexpr (Panel::kBits == 5) high = column_of(step.high, column) >> (lane & 3) * 2;
  if constexpr (Panel::kZeros) {
    const u32 zeros = step.zeros[Step<Panel>::kGroups == 2 && lane & 2 ? 1 : 0];
    excess = kMinusBase + (zeros >> 8 * column & 255) * 0x00010001u;
  }
  decode<Panel>(pairs, words, high, excess);
}

// Scales of whole columns, and biases, of a lane's four columns.
template <class Panel>
static __device__ __forceinline__ void finish(float (&total)[2][4], const u8* panel, int lane) {
  const int column = (lane >> 2 & 3) * 4;
#pragma unroll
  for (int two = 0; two < 2; ++two) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (column + 2 * two + i / 2) * 4;
      if constexpr (Panel::kColumnScale) {
        total[two][i] *= *reinterpret_cast<const float*>(panel + Panel::kColumnScaleAt + at);
      }
      if constexpr (Panel::kBias) total[two][i] += *reinterpret_cast<const float*>(panel + Panel::kBiasAt + at);
    }
  }
}
