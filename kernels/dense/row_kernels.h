// Steps of a layer around its products, row by row, for one instruction set each: norms, rotation, gating, attention.
//
// This header is read by files built for one instruction set: declarations only, no inline functions (gemm.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace moebius {

enum class Isa : int;  // kernels/isa/isa.h

namespace dense {

// Elements are float32, or bfloat16 where a flag says so; all are computed in float32 and rounded to nearest even.

// residual += update, rounded; output = residual / sqrt(mean(residual^2) + eps) * weight, rounded to the weight's type
// before the weight is applied (Zhang & Sennrich 2019). One row.
struct NormWork {
  bool is_bfloat16;           // residual and output
  bool update_is_bfloat16;
  bool weight_is_bfloat16;
  void* residual;             // [size]
  const void* update;         // [size]; null: nothing is added
  const void* weight;         // [size]
  void* output;               // [size]; may be the update's memory where both have one type
  float eps;
  uint32_t size;
};

// Norm and rotation of the heads of one row, in place. Element j of a head pairs with j + rotary_dim / 2, or with its
// neighbour where they are interleaved; the signs of `sine` are those of gpu_service/ops/rope.py.
struct RotateWork {
  bool is_bfloat16;           // heads, cosine and sine
  bool weights_are_bfloat16;
  void* heads;                // [num_heads][head_stride], head_dim columns
  const void* query_weight;   // [head_dim], of the first num_query_heads; null: no norm
  const void* key_weight;     // [head_dim], of the others
  const void* cosine;         // [rotary_dim]
  const void* sine;           // [rotary_dim]
  float* scratch;             // [2 * head_dim]
  float eps;
  uint32_t num_heads;
  uint32_t num_query_heads;
  uint32_t head_dim;          // a multiple of 16
  uint32_t head_stride;
  uint32_t rotary_dim;
  bool interleaved;
};

// output = silu(gate_up[0 ... size]) * gate_up[size ... 2 size], or max(gate_up, 0)^2, one row.
struct GateWork {
  bool is_bfloat16;
  bool is_squared_relu;
  const void* gate_up;        // [2 * size]; of a squared ReLU [size]
  void* output;               // [size]
  uint32_t size;
};

// What pages of keys, values and latents hold: float32, bfloat16, or 8-bit floats (e4m3, without infinity).
enum class PageType : uint8_t { kFloat32, kBFloat16, kFloat8 };

// Whether pages hold 8-bit floats instead of the activations' type; these are elements divided by a scale. Of latents,
// which are both keys and values, the scales are equal.
struct PageStorage {
  bool is_float8;
  float key_scale;            // 1 where the pages hold the activations' type
  float value_scale;          // likewise
};

// output = values / scale as e4m3, rounded to nearest even; what is too large saturates, infinity becomes NaN.
struct EncodeFloat8Work {
  bool is_bfloat16;           // values
  const void* values;         // [size]
  float scale;
  uint8_t* output;            // [size]
  uint32_t size;
};

// output = silu(values), neighbouring columns of one row.
struct SiluWork {
  bool is_bfloat16;
  const void* values;         // [size]
  void* output;               // [size]
  uint32_t size;
};

// The query heads of one key head, of one row, over positions [begin, end): softmax without its division, so that
// parts of a sequence can be joined.
struct AttendWork {
  PageType page_type;
  const float* query;         // [group][head_dim], multiplied by the scales of the softmax and of keys
  const std::byte* keys;      // of the key head in slot 0: slot s lies slot_bytes * s further
  const std::byte* values;
  size_t slot_bytes;
  const int32_t* pages;       // of the row's request
  uint32_t page_size;
  uint32_t begin;
  uint32_t end;
  uint32_t group;
  uint32_t head_dim;          // of queries and keys, a multiple of 16
  uint32_t value_dim;         // likewise
  float* scores;              // [group][kAttendBlock]
  float* output;              // [group][value_dim], sum of exp(score - maximum) * value
  float* maxima;              // [group]
  float* sums;                // [group], of exp(score - maximum)
};

// Queries of one key head, the lanes of a tile, over what they see of one request's positions. Softmax without its
// division, in the order of positions: the bits of a lane do not depend on the others.
struct AttendTileWork {
  PageType page_type;
  const float* query;         // [head_dim][lanes], multiplied by the scales of the softmax and of keys
  const std::byte* keys;      // as in AttendWork
  const std::byte* values;
  size_t slot_bytes;
  const int32_t* pages;
  uint32_t page_size;
  const float* begins;        // [lanes], first position that a lane sees
  const float* ends;          // [lanes], the position after the last one; lanes that see nothing: 0
  uint32_t begin;             // least of begins
  uint32_t end;               // largest of ends
  uint32_t all_begin;         // what all lanes see; nothing where all_end is not above it
  uint32_t all_end;
  uint32_t lanes;             // a multiple of kAttendLanes
  uint32_t head_dim;          // a multiple of 16
  float* block;               // scratch: [kAttendBlock][head_dim]
  float* scores;              // scratch: [kAttendBlock][lanes]
  float* kept;                // scratch: [lanes]
  float* output;              // [head_dim][lanes], sum of exp(score - maximum) * value
  float* maxima;              // [lanes]
  float* sums;                // [lanes], of exp(score - maximum)
};

// Lanes of a tile are a multiple of this, two vectors of the widest.
constexpr uint32_t kAttendLanes = 32;

// Positions whose scores are computed together: their keys and values stay in the first-level cache.
constexpr uint32_t kAttendBlock = 64;

// A causal convolution of one token: output = sum over taps of input * tap, and the bias; neighbouring channels. What
// is read and what is written are other memory. Products with gates are rounded, and so is what they multiply.
struct ConvolveWork {
  bool is_bfloat16;           // row, gates, recent, next and output
  bool activates;             // by SiLU
  const void* row;            // [channels], the token's own input, of the last tap
  const void* input_gates;    // [channels], factors of it; null: none
  const void* output_gates;   // [channels], likewise of the output
  const void* recent;         // [width - 1][stride], the inputs before it, oldest first
  void* next;                 // [width - 1][stride], the same of the next token
  const float* taps;          // [width][stride]
  const float* bias;          // [channels]; null: none
  void* output;               // [channels]
  uint32_t channels;
  uint32_t stride;
  uint32_t width;
};

// Decays of the rows of one head's state in Kimi Delta Attention (arXiv:2510.26692), x = steps + bias:
// exp(-rate * softplus(x)), or, with a bound, exp(bound * sigmoid(rate * x)).
struct DecayWork {
  bool is_bfloat16;           // steps
  const void* steps;          // [size]
  const float* bias;          // [size]
  float rate;                 // above 0
  float bound;                // below 0; 0: there is none
  float* decays;              // [size]
  uint32_t size;
};

// The gated delta rule (arXiv:2412.06464) for one head of one token, see gpu_service/ops/linear_attention.py.
struct DeltaWork {
  bool is_bfloat16;           // query, key, value and output
  const void* query;          // [key_dim], of any length
  const void* key;            // [key_dim], of any length
  const void* value;          // [value_dim]
  const float* state;         // [key_dim][value_dim]
  float* next;                // [key_dim][value_dim], the state after the token; other memory
  void* output;               // [value_dim]
  float* scratch;             // [3 * key_dim]
  const float* decays;        // [key_dim], of the rows of the state
  float beta;
  uint32_t key_dim;
  uint32_t value_dim;         // a multiple of 16
};

// Mamba-2's selective state space (arXiv:2405.21060) for one head of one token, see gpu_service/ops/state_space.py:
// state = decay * state + write (step * value)^T; output = read^T state + skip * value.
struct StateSpaceWork {
  bool is_bfloat16;           // read, write and value
  const void* read;           // [state_dim]
  const void* write;          // [state_dim]
  const void* value;          // [head_dim]
  const float* state;         // [state_dim][head_dim]
  float* next;                // [state_dim][head_dim], the state after the token; other memory
  float* output;              // [head_dim]
  float* scratch;             // [2 * state_dim]
  float decay;
  float step;
  float skip;
  uint32_t state_dim;
  uint32_t head_dim;          // a multiple of 16
};

// Mamba's selective state space (arXiv:2312.00752) for neighbouring channels of one token, see
// gpu_service/ops/selective_scan.py: with step = softplus(steps), decay = exp(-step * exp(a_log)),
// state = decay * state + write * (step * value); output = (sum of read * state + skip * value) * silu(gate).
struct SelectiveScanWork {
  bool is_bfloat16;           // values, steps, gates and output
  const void* values;         // [channels]
  const void* steps;          // [channels]
  const void* gates;          // [channels]
  const float* write;         // [state_dim]
  const float* read;          // [state_dim]
  const float* a_log;         // [channels][state_dim]
  const float* skip;          // [channels]
  const float* state;         // [channels][state_dim]
  float* next;                // [channels][state_dim], the state after the token; other memory
  void* output;               // [channels]
  float* scratch;             // [3 * channels]
  uint32_t channels;
  uint32_t state_dim;
};

// output = rms_norm(values * silu(gates)) * weight, rounded once; neighbouring columns of one row.
struct GatedGroupNormWork {
  bool is_bfloat16;           // gates, weight and output
  const float* values;        // [size]
  const void* gates;          // [size]
  const void* weight;         // [size]
  float* scratch;             // [size]
  void* output;               // [size]
  float eps;
  uint32_t size;
};

// output = rms_norm(values) * weight * silu(gates), the norm rounded before and after the weight, as add_norm; or
// sigmoid(gates), rounded once. One head.
struct GatedNormWork {
  bool is_bfloat16;           // everything
  bool is_sigmoid;
  const void* values;         // [size]
  const void* gates;          // [size]
  const void* weight;         // [size]
  void* output;               // [size]
  float eps;
  uint32_t size;
};

// output = values * sigmoid(gates), or softplus(gates), which is rounded first; one row. A gate is of size / num_gates
// neighbours.
struct ApplyGateWork {
  bool is_bfloat16;
  bool is_softplus;
  const void* values;         // [size]
  const void* gates;          // [num_gates]
  void* output;               // [size]; may be the values' memory
  uint32_t size;
  uint32_t num_gates;
};

// Products of few rows with a matrix of one head. Sums are in the order of what is summed over, whatever else is
// computed.
struct HeadProductWork {
  bool is_bfloat16;           // matrix and output
  const void* matrix;         // [matrix_rows][matrix_stride], matrix_columns read
  size_t matrix_stride;
  const float* rows;          // [num_rows][matrix_rows]; transposed: [num_rows][matrix_columns]
  void* output;               // [num_rows][output_stride]
  size_t output_stride;
  uint32_t num_rows;
  uint32_t matrix_rows;
  uint32_t matrix_columns;    // a multiple of 16
};

struct RowKernels {
  void (*add_norm)(const NormWork& work);
  void (*rotate)(const RotateWork& work);
  void (*gate)(const GateWork& work);
  void (*silu)(const SiluWork& work);
  void (*attend)(const AttendWork& work);
  void (*attend_tile)(const AttendTileWork& work);
  void (*encode_float8)(const EncodeFloat8Work& work);
  // sum of a[i] * b[i], b float32.
  float (*dot)(const void* a, bool is_bfloat16, const float* b, uint32_t size);
  void (*convolve)(const ConvolveWork& work);
  void (*compute_decays)(const DecayWork& work);
  void (*update_delta)(const DeltaWork& work);
  void (*update_state_space)(const StateSpaceWork& work);
  void (*scan)(const SelectiveScanWork& work);
  void (*gated_group_norm)(const GatedGroupNormWork& work);
  void (*gated_norm)(const GatedNormWork& work);
  void (*apply_gate)(const ApplyGateWork& work);
  // output = rows x matrix, and rows x matrix^T.
  void (*head_product)(const HeadProductWork& work);
  void (*transposed_head_product)(const HeadProductWork& work);
};

const RowKernels& row_kernels_scalar();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

}  // namespace dense
}  // namespace moebius
