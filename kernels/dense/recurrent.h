// Steps of layers that keep a state of each request, and gates, over all rows of a step on the threads of the dense
// layers. Rows are tokens; those of one request follow each other, each reading the state that the one before it wrote.
//
// Memory and strides as in row_ops.h. Slots of states are other memory for what a row reads and what it writes.
#pragma once

#include <cstdint>

#include "kernels/dense/dense_threads.h"

namespace moebius::dense {

// A causal convolution, see ConvolveWork.
struct Convolution {
  bool is_bfloat16;  // rows, gates, states and output
  bool activates;
  const void* rows;       // [num_rows][row_stride], `channels` columns
  const void* input_gates;  // likewise; null: none
  const void* output_gates;  // likewise
  size_t row_stride;
  uint32_t num_rows;
  uint32_t channels;
  uint32_t width;
  void* states;           // [slots][width - 1][channels], the latest inputs
  const int64_t* reads;   // [num_rows], slots
  const int64_t* writes;  // [num_rows]
  const float* taps;      // [width][channels]
  const float* bias;      // [channels]; null: none
  void* output;           // [num_rows][channels]
};
void convolve(DenseThreads& threads, const Convolution& call);

// How the states of a delta rule decay: a head has one decay, or one for each element of a key (Kimi Delta Attention).
struct DecayRule {
  bool is_by_element;
  float bound;  // as in DecayWork, of elements only
  const float* a_log;  // [num_value_heads]
  const float* dt_bias;  // [num_value_heads], or of all elements: [num_value_heads][key_dim]
};

// The gated delta rule, see DeltaWork. A key head serves num_value_heads / num_key_heads value heads.
struct DeltaRule {
  bool is_bfloat16;       // all rows
  const void* qkv;        // [num_rows][qkv_stride]: queries, keys of all key heads, values of all value heads
  size_t qkv_stride;
  const void* a;  // [num_rows][a_stride], columns as dt_bias: of decays
  size_t a_stride;
  const void* b;  // [num_rows][b_stride], num_value_heads columns: of how much of a value is taken
  size_t b_stride;
  DecayRule decay;
  float* states;          // [slots][num_value_heads][key_dim][value_dim]
  const int64_t* reads;   // [num_rows], slots
  const int64_t* writes;  // [num_rows]
  void* output;           // [num_rows][num_value_heads][value_dim]
  uint32_t num_rows;
  uint32_t num_key_heads;
  uint32_t num_value_heads;
  uint32_t key_dim;
  uint32_t value_dim;     // a multiple of 16
};
void update_delta(DenseThreads& threads, const DeltaRule& call);

// How a state space steps and what skips it.
struct StepRule {
  const float* a_log;  // [num_heads]
  const float* dt_bias;  // [num_heads]
  const float* skip;  // [num_heads], D
};

// Mamba-2, see StateSpaceWork. A group serves num_heads / num_groups heads.
struct StateSpace {
  bool is_bfloat16;  // all rows
  const void* xbc;  // [num_rows][xbc_stride]: values of all heads, then what groups write, then what they read
  size_t xbc_stride;
  const void* dt;  // [num_rows][dt_stride], num_heads columns; null: zeros
  size_t dt_stride;
  StepRule step;
  float* states;  // [slots][num_heads][state_dim][head_dim]
  const int64_t* reads;  // [num_rows], slots
  const int64_t* writes;  // [num_rows]
  float* output;  // [num_rows][num_heads][head_dim]
  uint32_t num_rows;
  uint32_t num_groups;
  uint32_t num_heads;
  uint32_t state_dim;
  uint32_t head_dim;  // a multiple of 16
};
void update_state_space(DenseThreads& threads, const StateSpace& call);

// Neighbouring columns of rows, `stride` elements apart.
struct RowColumns {
  const void* values;
  size_t stride;
};

// Mamba, see SelectiveScanWork.
struct SelectiveScan {
  bool is_bfloat16;  // all rows
  RowColumns values;  // [num_rows][channels]
  RowColumns steps;  // [num_rows][channels]
  RowColumns write;  // [num_rows][state_dim], of all channels
  RowColumns read;  // [num_rows][state_dim], likewise
  RowColumns gates;  // [num_rows][channels]
  const float* a_log;  // [channels][state_dim]
  const float* skip;  // [channels]
  float* states;  // [slots][channels][state_dim]
  const int64_t* reads;  // [num_rows], slots
  const int64_t* writes;  // [num_rows]
  void* output;  // [num_rows][channels]
  uint32_t num_rows;
  uint32_t channels;
  uint32_t state_dim;
};
void scan(DenseThreads& threads, const SelectiveScan& call);

// See GatedGroupNormWork, which describes the first group of the first row, without its scratch. Values and output:
// [num_rows][num_groups][size].
struct GatedGroupNorm {
  GatedGroupNormWork first;
  uint32_t num_rows;
  uint32_t num_groups;
  size_t gates_stride;  // between rows
};
void gated_group_norm(DenseThreads& threads, const GatedGroupNorm& call);

// See GatedNormWork, which describes the first head of the first row. Values and output: [num_rows][num_heads][size].
struct GatedNorm {
  GatedNormWork first;
  uint32_t num_rows;
  uint32_t num_heads;
  size_t gates_stride;    // between rows
};
void gated_norm(DenseThreads& threads, const GatedNorm& call);

// See ApplyGateWork, which describes the first row; values and output are [num_rows][size].
void apply_gate(DenseThreads& threads, const ApplyGateWork& first, size_t gates_stride, uint32_t num_rows);

}  // namespace moebius::dense
