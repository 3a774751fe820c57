// Consecutive decoder layers whose rows are all computed alone, as in decode: one call for all of them.
//
// A layer is `x += mixer(norm(x)); x += ffn(norm(x))`, or one of the two, or, where the stream is normed,
// `x = norm(x); x = a x + b mixer(x)` and the same of the other half: the mixer is grouped-query attention over paged
// keys and values, latent attention over paged latents, a delta rule, a state space of heads or of channels, Lightning
// attention, or a short convolution, and the other half an MLP, routed experts, or both. Its steps are those of
// row_ops.h, latent_attention.h, recurrent.h and dense_matrix.h in the order in which the engine calls them one by one,
// on the same memory types, so that both ways give the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/dense/layer_weights.h"
#include "kernels/moe/routed_experts.h"

namespace moebius::dense {

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
    AlignedBuffer unordered;   // columns of a product as its weight is stored
    AlignedBuffer projected;  // queries, keys, values; queries of latents; what a delta rule reads
    AlignedBuffer narrow;  // latents of queries and tokens, parts of keys
    AlignedBuffer normed_narrow;  // latents of queries, or what steps, writes and reads of channels are made of
    AlignedBuffer absorbed;  // num_heads * latent_dim: queries of latents
    AlignedBuffer attended_latents;  // likewise: what they attend to
    AlignedBuffer convolved;  // queries, keys, values of a delta rule, or what a short convolution answers
    AlignedBuffer attended;    // num_heads * head_dim, or what a delta rule answers
    AlignedBuffer wide;  // what a state space answers, float32
    AlignedBuffer decays;  // what decays of a delta rule, or steps of channels, are made of
    AlignedBuffer gates;  // of what is attended to or remembered, or of an MLP
    AlignedBuffer gate_up;
    AlignedBuffer activated;   // half of it
    AlignedBuffer dense;       // hidden_size: what a mixer, or an MLP, adds
    AlignedBuffer answer;      // hidden_size, float32: what experts add, in their space if they have one
    AlignedBuffer latents;     // what experts read and answer in a space of their own
    AlignedBuffer expanded;    // hidden_size: such an answer
    AlignedBuffer logits;      // num_experts, or one of an output gate; float32
    AlignedBuffer weights;     // top_k, float32
    AlignedBuffer ids;         // top_k, int32
  };
  // What is to be added to the residual stream.
  struct Update {
    std::byte* values = nullptr;
    bool is_bfloat16 = false;
  };

  void add_norm(const StepRows& step, const NormWeights& norm, const Update& update);
  void multiply(const StepRows& step, const Projection& projection, const AlignedBuffer& rows, AlignedBuffer& output);
  void multiply_columns(const StepRows& step, const Projection& projection, const std::byte* columns, size_t stride,
                        AlignedBuffer& output);
  void mix(const StepRows& step, const AttentionWeights& attention);
  void norm_full_width(const StepRows& step, const AttentionWeights& attention, size_t stride);
  void weigh(const StepRows& step, const AttentionWeights& attention, size_t stride);
  void mix(const StepRows& step, const LatentWeights& latent);
  void project_latent_queries(const StepRows& step, const LatentWeights& latent);
  void append_latents(const StepRows& step, const LatentWeights& latent);
  void mix(const StepRows&, const NoMixer&) {}
  void mix(const StepRows& step, const DeltaWeights& delta);
  void mix(const StepRows& step, const ShortConvWeights& conv);
  void mix(const StepRows& step, const StateSpaceWeights& space);
  void mix(const StepRows& step, const SelectiveScanWeights& scan);
  void mix(const StepRows& step, const LightningWeights& lightning);
  RowColumns project_columns(const StepRows& step, const Projection& input, uint32_t begin, const Projection& next,
                          AlignedBuffer& output);
  void ask_experts(const StepRows& step, const LayerWeights& layer, RoutedExperts& experts);
  void compute_mlp(const StepRows& step, const MlpWeights& mlp);
  void weigh_mlp(const StepRows& step, const void* output_gate);
  void add_dense(size_t count);
  Update expand_answer(const StepRows& step, const Projection& outputs, bool has_mlp);
  Update compute_ffn(const StepRows& step, const LayerWeights& layer, RoutedExperts* experts);
  void scale(const Update& update, float factor, uint32_t num_rows);
  void restart(const StepRows& step, const Update& update, float kept, float added);
  void copy_update(const StepRows& step, const Update& update) const;

  std::shared_ptr<DenseThreads> threads_;
  bool is_bfloat16_;
  size_t element_bytes_;
  uint32_t hidden_size_;
  std::vector<LayerWeights> layers_;
  Buffers buffers_;
};

}  // namespace moebius::dense
