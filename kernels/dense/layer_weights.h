// What decoder layers are computed from, and the rows of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "kernels/dense/dense_matrix.h"
#include "kernels/dense/recurrent.h"
#include "kernels/dense/row_ops.h"

namespace moebius::dense {

// Weights are the caller's and outlive the layers. Floating-point memory is of the layers' type where nothing is said.

struct NormWeights {
  const void* weight;  // [hidden_size]
  bool is_bfloat16;
  float eps;
};

struct Projection {
  std::shared_ptr<DenseMatrix> matrix;  // null: there is none
  const float* bias;                    // [out_features]; null: none
  const int64_t* order;                 // [out_features], of the product's columns; null: as they are stored
};

// Grouped-query attention. Gates are the last columns of qkv, one of each element, or a projection of their own.
struct AttentionWeights {
  Projection qkv;           // queries, keys, values of all heads
  Projection output;
  Projection gate;          // a gate of each head, or of each element
  bool gates_are_softplus;  // else sigmoids
  const void* query_norm;   // [head_dim], or of all heads together; null: none
  const void* key_norm;     // likewise
  bool norms_are_bfloat16;
  bool norms_are_full_width;
  float norm_eps;
  const float* sinks;       // [num_heads]; null: none
  void* pages;              // [pages][page_size][2 * num_kv_heads][head_dim], see `storage`
  uint32_t page_size;
  uint32_t num_heads;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  float scale;
  std::optional<uint32_t> rotation;  // index of StepRows::rotations; none: nothing is rotated
  uint32_t sight;           // index of StepRows::sights
  PageStorage storage;      // of the pages
};

// Latent attention to all tokens, see latent_attention.h.
struct LatentWeights {
  Projection narrow;  // latents of queries, where they have any; latents; parts of keys that are rotated
  Projection query;  // queries of all heads, from their latents or from what the layer reads
  Projection output;
  NormWeights query_norm;  // of latents of queries; null weight: they have none
  NormWeights latent_norm;
  const void* heads;  // [num_heads][nope_dim + value_dim][latent_dim]: rows of keys, then of values
  const float* sinks;  // [num_heads]; null: none
  void* pages;  // [pages][page_size][latent_dim + rope_dim]
  uint32_t page_size;
  uint32_t num_heads;
  uint32_t latent_dim;
  uint32_t nope_dim;  // elements of a query that carry no position
  uint32_t rope_dim;
  uint32_t value_dim;
  float scale;
  std::optional<uint32_t> rotation;  // index of StepRows::rotations; none: nothing is rotated
  uint32_t sight;  // index of StepRows::sights
  PageStorage storage;  // of the pages
};

// The gated delta rule after a causal convolution, with decays of heads or of elements of a key, see recurrent.h.
struct DeltaWeights {
  Projection input;  // queries, keys, values of all heads, then the columns below
  Projection decays;  // a, from `a_column` on as many columns as it takes; null: these columns are a
  Projection gates;  // of values, likewise
  Projection output;
  uint32_t b_column;
  uint32_t a_column;
  uint32_t gate_column;
  const float* taps;        // [width][channels]
  const float* bias;        // [channels]; null: none
  uint32_t width;
  DecayRule decay;
  const void* norm;         // [value_dim]
  float norm_eps;
  bool gates_are_sigmoid;   // else SiLU
  void* recent;             // [slots][width - 1][channels]
  float* states;            // [slots][num_value_heads][key_dim][value_dim]
  uint32_t num_key_heads;
  uint32_t num_value_heads;
  uint32_t key_dim;
  uint32_t value_dim;
};

// A causal convolution between two gates (LFM2), see ConvolveWork.
struct ShortConvWeights {
  Projection input;  // gates of inputs; gates of outputs; inputs: of all channels
  Projection output;
  const float* taps;  // [width][channels]
  const float* bias;  // [channels]; null: none
  uint32_t width;
  void* recent;  // [slots][width - 1][channels]
  uint32_t channels;
};

// Mamba-2 after a causal convolution, see recurrent.h.
struct StateSpaceWeights {
  Projection input;  // gates; values; what groups write, what they read; dt
  Projection output;
  const float* taps;  // [width][channels]: all but gates and dt
  const float* bias;  // [channels]; null: none
  uint32_t width;
  StepRule step;
  const void* norm;  // [num_heads * head_dim]
  float norm_eps;
  void* recent;  // [slots][width - 1][channels]
  float* states;  // [slots][num_heads][state_dim][head_dim]
  uint32_t num_groups;
  uint32_t num_heads;
  uint32_t state_dim;
  uint32_t head_dim;
};

// Mamba after a causal convolution, see recurrent.h.
struct SelectiveScanWeights {
  Projection input;  // values, then gates, of all channels
  Projection narrow;  // from values: what steps are made of; what channels write, what they read
  Projection steps;  // of all channels, from what the first of these norms gives
  Projection output;
  NormWeights step_norm;
  NormWeights write_norm;
  NormWeights read_norm;
  const float* taps;  // [width][channels]
  const float* bias;  // [channels]; null: none
  uint32_t width;
  const float* a_log;  // [channels][state_dim]
  const float* skip;  // [channels]
  void* recent;  // [slots][width - 1][channels]
  float* states;  // [slots][channels][state_dim]
  uint32_t channels;
  uint32_t state_dim;
};

// Lightning attention (arXiv:2501.08313): the recurrence of Mamba-2 with steps of one, after SiLU.
struct LightningWeights {
  Projection input;  // values, keys, queries of all heads; gates of values
  Projection output;
  StepRule step;  // makes steps of one without a projection, and nothing skips the state
  NormWeights norm;  // over all heads together
  float* states;  // [slots][num_heads][key_dim][value_dim]
  uint32_t num_heads;
  uint32_t key_dim;
  uint32_t value_dim;
};

// A layer that is a feed-forward block alone.
struct NoMixer {};

// down(silu(gate) * up), or down(max(up, 0)^2), times the sigmoid of one product where it has an output gate.
struct MlpWeights {
  Projection gate_up;  // of a squared ReLU up alone
  Projection down;
  const void* output_gate;  // [hidden_size]; null: none
  bool is_squared_relu;
};

struct RouterWeights {
  const void* weight;       // [num_experts][hidden_size]; null: the layer has no experts
  const float* bias;        // [num_experts]; null: none
  const float* correction;  // as Routing has it
  bool is_bfloat16;         // of the weight, and what logits are rounded to
  RoutingRule rule;
  // From what the layer reads to a space of the experts', and back; null: experts read what the layer reads.
  Projection inputs;
  Projection outputs;
};

// Factors of what a half reads, which is the stream from there on, and of what it adds (MiniMax-01).
struct NormedStream {
  float mixer_kept;
  float mixer_added;
  float ffn_kept;
  float ffn_added;
};

struct LayerWeights {
  NormWeights input_norm;  // null weight: without a mixer
  std::variant<AttentionWeights, LatentWeights, DeltaWeights, ShortConvWeights, StateSpaceWeights, SelectiveScanWeights,
               LightningWeights, NoMixer>
      mixer;
  NormWeights ffn_norm;  // null weight: a layer that is a mixer alone
  MlpWeights mlp;        // of a layer with experts: those that are always active; null matrices: none
  RouterWeights router;
  uint32_t layer;        // as experts are asked for it
  float residual_scale;  // of what either half adds, which is rounded before it is added
  std::optional<NormedStream> normed_stream;  // none: norms are read by the halves alone
};

struct Rotation {
  const void* cosine;   // [num_rows][rotary_dim]
  const void* sine;
  uint32_t rotary_dim;
  bool interleaved;
};

// What rows see in layers of one window or chunk.
struct Sight {
  const int32_t* begins;  // [num_rows], the first position
  const int32_t* ends;    // [num_rows], the position after the last one
};

// Where the experts that a layer's rows choose are copied to.
struct NotedChoices {
  uint32_t layer;  // as `LayerWeights` has it
  int32_t* ids;    // [num_rows][top_k]
};

// The rows of one step. Those of one request follow each other.
struct StepRows {
  uint32_t num_rows;
  void* residual;              // [num_rows][hidden_size]; increased by all but the last layer's last addition
  void* update;                // [num_rows][hidden_size], that addition; float32 after routed experts
  const int64_t* slot_mapping;  // [num_rows]
  const int32_t* block_table;   // [requests][table_stride]
  size_t table_stride;
  const int32_t* requests;      // [num_rows]
  std::vector<Rotation> rotations;
  std::vector<Sight> sights;
  const int64_t* state_reads;   // [num_rows], slots of states before a row and after it; other slots
  const int64_t* state_writes;
  std::vector<NotedChoices> noted;
};

}  // namespace moebius::dense
