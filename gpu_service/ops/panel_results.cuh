// What becomes of a lane's sums for experts: activations, and their way to memory. A part of grouped_panels.cu and of
// warpgroup_panels.cu, which say what a lane's are.

// As gemm.py's `activate`.
static __device__ __forceinline__ float activate(float gate, float up, float alpha, float limit) {
  if constexpr (kActivation == ACTIVATION_SILU) return quotient(gate, 1 + exponential(-gate)) * up;
  if constexpr (kActivation == ACTIVATION_SILU_CLAMPED) {
    return fminf(quotient(gate, 1 + exponential(-gate)), limit) * fminf(fmaxf(up, -limit), limit);
  }
  if constexpr (kActivation == ACTIVATION_GELU_TANH) {
    // The tanh form of GELU, by the logistic function.
    const float inner = gate * (1.5957691216057308f + 0.0713548162726f * gate * gate);
    return quotient(gate, 1 + exponential(-inner)) * up;
  }
  if constexpr (kActivation == ACTIVATION_RELU2) {
    const float kept = fmaxf(up, 0.0f);
    return kept * kept;
  }
  if constexpr (kActivation == ACTIVATION_CLAMPED_SILU) {
    const float kept = fminf(gate, limit);
    return quotient(kept, 1 + exponential(-kept)) * fminf(fmaxf(up, -limit), limit);
  }
  const float kept = fminf(gate, limit);
  return (fminf(fmaxf(up, -limit), limit) + 1) * quotient(kept, 1 + exponential(-alpha * kept));
}

// Strips of columns that a warp takes each: 16 channels of gate and up, or two panels.
constexpr int kGateUpStrips = kGated ? kIntermediateColumns / 16 : (kIntermediateColumns / 16 + 1) / 2;
constexpr int kDownStrips = ((kHidden + 15) / 16 + 1) / 2;

// Where a panel of gate and up of a strip of columns lies in an expert, for a lane: the second half of a group of lanes
// has up's of the channels that the first half has gate's of, or without a gate the next panel.
static __device__ __forceinline__ u64 gate_up_at(int strip, int lane) {
  constexpr int kPanels = kIntermediateColumns / 16;
  const bool is_second = lane & 16;
  if constexpr (kGated) return is_second ? kUpAt + u64(strip) * kUpStep : u64(strip) * kGateStep;
  const int wanted = 2 * strip + is_second;
  return kUpAt + u64(wanted < kPanels ? wanted : kPanels - 1) * kUpStep;
}

static __device__ __forceinline__ u64 down_at(int strip, int lane) {
  constexpr int kPanels = (kHidden + 15) / 16;
  const int wanted = 2 * strip + (lane & 16 ? 1 : 0);
  return kDownAt + u64(wanted < kPanels ? wanted : kPanels - 1) * Down::kPanelBytes;
}

// The pairs of a lane's two rows of eight.
static __device__ __forceinline__ int2 own_pairs(const int* pairs, int lane) {
  return reinterpret_cast<const int2*>(pairs)[lane & 3];
}

// Writes the activations of eight rows, bfloat16. `found`: [pair of columns][column, row]; `own`: the lane's rows;
// `place`: where a row has a channel.
template <class Place>
static __device__ __forceinline__ void write_activations(float (&found)[2][4], const u8* panel, int2 own, int strip,
                                                         int lane, u8* intermediate, int count, float alpha,
                                                         float limit, Place place) {
  const bool is_second = lane & 16;
  finish<GateUp>(found, panel, lane);
  u32 values[2][2];  // [row][pair of columns]
  int channel = strip * (kGated ? 16 : 32) + (lane >> 2 & 3) * 4;
  if constexpr (kGated) {
    // Lanes of gate take their first two columns, lanes of up the last two: each sends what the other lacks.
    float mixed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sent = other_panel(is_second ? found[0][i] : found[1][i]);
      const float gate = is_second ? sent : found[0][i], up = is_second ? found[1][i] : sent;
      mixed[i] = activate(gate, up, alpha, limit);
    }
    values[0][0] = rounded_pair(mixed[0], mixed[2]);
    values[1][0] = rounded_pair(mixed[1], mixed[3]);
    channel += is_second ? 2 : 0;
  } else {
#pragma unroll
    for (int two = 0; two < 2; ++two) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float low = activate(0, found[two][row], alpha, limit);
        values[row][two] = rounded_pair(low, activate(0, found[two][row + 2], alpha, limit));
      }
    }
    channel += is_second ? 16 : 0;
  }
  if (channel >= kIntermediateColumns) return;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int pair = row ? own.y : own.x;
    u8* target = intermediate + u64(pair) * kIntermediateColumns * 2;
    if (pair < count) *reinterpret_cast<u32*>(target + place(channel) * 2) = values[row][0];
    if constexpr (kGated) continue;
    if (pair < count) *reinterpret_cast<u32*>(target + place(channel + 2) * 2) = values[row][1];
  }
}

// Writes the outputs of eight rows, float32 [pairs, kHidden].
static __device__ __forceinline__ void write_outputs(float (&found)[2][4], const u8* panel, int2 own, int strip,
                                                     int lane, float* outputs, int count) {
  const int feature = strip * 32 + (lane & 16) + (lane >> 2 & 3) * 4;
  if (feature >= kHidden) return;
  finish<Down>(found, panel, lane);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int pair = row ? own.y : own.x;
    float4* target = reinterpret_cast<float4*>(outputs + u64(pair) * kHidden + feature);
    if (pair < count) *target = make_float4(found[0][row], found[0][row + 2], found[1][row], found[1][row + 2]);
  }
}
