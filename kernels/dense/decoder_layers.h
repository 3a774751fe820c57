// Consecutive decoder layers whose rows are all computed alone, as in decode: one call for all of them.
//
// A layer is `x += attention(norm(x)); x += ffn(norm(x))` with grouped-query attention over paged keys and values, and
// an MLP, routed experts, or both. Its steps are those of row_ops.h and dense_matrix.h in the order in which the engine
// calls them one by one, on the same memory types, so that both ways give the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/dense/dense_matrix.h"
#include "kernels/dense/row_ops.h"
#include "kernels/moe/routed_experts.h"

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
};

struct AttentionWeights {
  Projection qkv;           // queries, keys, values of all heads
  Projection output;
  const void* query_norm;   // [head_dim]; null: none
  const void* key_norm;     // [head_dim]; null: none
  float norm_eps;
  const float* sinks;       // [num_heads]; null: none
  void* pages;              // [pages][page_size][2 * num_kv_heads][head_dim]
  uint32_t page_size;
  uint32_t num_heads;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  float scale;
  uint32_t rotation;        // index of StepRows::rotations
  uint32_t sight;           // index of StepRows::sights
};

// down(silu(gate) * up).
struct MlpWeights {
  Projection gate_up;
  Projection down;
};

struct RouterWeights {
  const void* weight;       // [num_experts][hidden_size]; null: the layer has no experts
  const float* bias;        // [num_experts]; null: none
  const float* correction;  // as Routing has it
  bool is_bfloat16;         // of the weight, and what logits are rounded to
  RoutingRule rule;
};

struct LayerWeights {
  NormWeights input_norm;
  AttentionWeights attention;
  NormWeights ffn_norm;
  MlpWeights mlp;        // of a layer with experts: those that are always active; null matrices: none
  RouterWeights router;
  uint32_t layer;        // as experts are asked for it
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

// The rows of one step.
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
};

// One call at a time.
class DecoderLayers {
 public:
  // Throws std::invalid_argument naming the layer whose matrices do not fit its sizes.
  DecoderLayers(std::shared_ptr<DenseThreads> threads, bool is_bfloat16, uint32_t hidden_size,
                std::vector<LayerWeights> layers);

  // Computes the layers, keys and values of the rows included; may be called again for the same rows. `experts` may be
  // null where no layer has any. Throws what they throw.
  void run(const StepRows& step, RoutedExperts* experts);

 private:
  // Memory of one step, [num_rows] rows each.
  struct Buffers {
    AlignedBuffer normed;      // hidden_size
    AlignedBuffer projected;   // queries, keys, values
    AlignedBuffer attended;    // num_heads * head_dim
    AlignedBuffer gate_up;
    AlignedBuffer activated;   // half of it
    AlignedBuffer dense;       // hidden_size: what attention, or an MLP, adds
    AlignedBuffer answer;      // hidden_size, float32: what experts add
    AlignedBuffer logits;      // num_experts, float32
    AlignedBuffer weights;     // top_k, float32
    AlignedBuffer ids;         // top_k, int32
  };
  // What is to be added to the residual stream.
  struct Update {
    const void* values = nullptr;
    bool is_bfloat16 = false;
  };

  void add_norm(const StepRows& step, const NormWeights& norm, const Update& update);
  void multiply(const StepRows& step, const Projection& projection, const AlignedBuffer& rows, AlignedBuffer& output);
  void attend(const StepRows& step, const AttentionWeights& attention);
  void ask_experts(const StepRows& step, const LayerWeights& layer, RoutedExperts& experts);
  void compute_mlp(const StepRows& step, const MlpWeights& mlp);
  void add_dense(size_t count);
  Update compute_ffn(const StepRows& step, const LayerWeights& layer, RoutedExperts* experts);
  void copy_update(const StepRows& step, const Update& update) const;

  std::shared_ptr<DenseThreads> threads_;
  bool is_bfloat16_;
  size_t element_bytes_;
  uint32_t hidden_size_;
  std::vector<LayerWeights> layers_;
  Buffers buffers_;
};

}  // namespace moebius::dense
