#include "kernels/dense/decoder_layers.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace moebius::dense {
namespace {

DType float_type(bool is_bfloat16) { return is_bfloat16 ? DType::kBFloat16 : DType::kFloat32; }

void check_shape(const Projection& projection, uint32_t in_features, uint32_t out_features, size_t index,
                 const char* name) {
  const DenseMatrix& matrix = *projection.matrix;
  if (matrix.in_features() == in_features && matrix.out_features() == out_features) return;
  throw std::invalid_argument("layer " + std::to_string(index) + ": " + name + " is " +
                              std::to_string(matrix.out_features()) + " x " + std::to_string(matrix.in_features()) +
                              "; it must be " + std::to_string(out_features) + " x " + std::to_string(in_features));
}

void check_layer(const LayerWeights& layer, uint32_t hidden_size, size_t index) {
  const AttentionWeights& attention = layer.attention;
  const uint32_t heads = attention.num_heads * attention.head_dim;
  const uint32_t kv_heads = attention.num_kv_heads * attention.head_dim;
  check_shape(attention.qkv, hidden_size, heads + 2 * kv_heads, index, "qkv");
  check_shape(attention.output, heads, hidden_size, index, "output");
  if (layer.mlp.down.matrix == nullptr) return;
  const uint32_t intermediate = layer.mlp.down.matrix->in_features();
  check_shape(layer.mlp.gate_up, hidden_size, 2 * intermediate, index, "gate_up");
  check_shape(layer.mlp.down, intermediate, hidden_size, index, "down");
}

}  // namespace

DecoderLayers::DecoderLayers(std::shared_ptr<DenseThreads> threads, bool is_bfloat16, uint32_t hidden_size,
                             std::vector<LayerWeights> layers)
    : threads_(std::move(threads)),
      is_bfloat16_(is_bfloat16),
      element_bytes_(is_bfloat16 ? sizeof(uint16_t) : sizeof(float)),
      hidden_size_(hidden_size),
      layers_(std::move(layers)) {
  for (size_t index = 0; index < layers_.size(); ++index) check_layer(layers_[index], hidden_size, index);
}

void DecoderLayers::run(const StepRows& step, RoutedExperts* experts) {
  Update update;
  for (const LayerWeights& layer : layers_) {
    add_norm(step, layer.input_norm, update);
    attend(step, layer.attention);
    add_norm(step, layer.ffn_norm, {buffers_.dense.data(), is_bfloat16_});
    update = compute_ffn(step, layer, experts);
  }
  copy_update(step, update);
}

void DecoderLayers::add_norm(const StepRows& step, const NormWeights& norm, const Update& update) {
  buffers_.normed.grow(size_t{step.num_rows} * hidden_size_ * element_bytes_);
  dense::add_norm(*threads_,
                  {is_bfloat16_, update.is_bfloat16, norm.is_bfloat16, step.residual, update.values, norm.weight,
                   buffers_.normed.data(), norm.eps, hidden_size_},
                  step.num_rows);
}

void DecoderLayers::multiply(const StepRows& step, const Projection& projection, const AlignedBuffer& rows,
                             AlignedBuffer& output) {
  DenseMatrix& matrix = *projection.matrix;
  output.grow(size_t{step.num_rows} * matrix.out_features() * element_bytes_);
  matrix.multiply({rows.data(), matrix.in_features(), step.num_rows, float_type(is_bfloat16_), output.data(),
                   matrix.out_features(), float_type(is_bfloat16_), projection.bias});
}

void DecoderLayers::attend(const StepRows& step, const AttentionWeights& attention) {
  const uint32_t head_dim = attention.head_dim;
  const uint32_t rotated = attention.num_heads + attention.num_kv_heads;
  const size_t stride = size_t{rotated + attention.num_kv_heads} * head_dim;
  const Rotation& rotation = step.rotations[attention.rotation];
  const Sight& sight = step.sights[attention.sight];
  multiply(step, attention.qkv, buffers_.normed, buffers_.projected);
  std::byte* const projected = buffers_.projected.data();
  const RotateWork first{is_bfloat16_, projected, attention.query_norm, attention.key_norm, rotation.cosine,
                         rotation.sine, nullptr, attention.norm_eps, rotated, attention.num_heads, head_dim,
                         rotation.rotary_dim, rotation.interleaved};
  rotate_and_append(*threads_, {first, stride, step.num_rows, projected + size_t{rotated} * head_dim * element_bytes_,
                                stride, attention.pages, step.slot_mapping});
  buffers_.attended.grow(size_t{step.num_rows} * attention.num_heads * head_dim * element_bytes_);
  dense::attend(*threads_, {is_bfloat16_, projected, stride, attention.pages, step.block_table, step.table_stride,
                            step.requests, sight.begins, sight.ends, attention.sinks, buffers_.attended.data(),
                            attention.scale, step.num_rows, attention.num_heads, attention.num_kv_heads, head_dim,
                            attention.page_size});
  multiply(step, attention.output, buffers_.attended, buffers_.dense);
}

void DecoderLayers::ask_experts(const StepRows& step, const LayerWeights& layer, RoutedExperts& experts) {
  const RouterWeights& router = layer.router;
  const size_t chosen = size_t{step.num_rows} * router.rule.top_k;
  buffers_.logits.grow(size_t{step.num_rows} * router.rule.num_experts * sizeof(float));
  buffers_.weights.grow(chosen * sizeof(float));
  buffers_.ids.grow(chosen * sizeof(int32_t));
  score_experts(*threads_, {buffers_.normed.data(), is_bfloat16_, step.num_rows, hidden_size_, router.weight,
                            router.is_bfloat16, router.bias, router.rule.num_experts, buffers_.logits.as<float>()});
  const Routing routing{router.rule, buffers_.logits.as<float>(), router.correction, nullptr,
                        buffers_.weights.as<float>(), buffers_.ids.as<int32_t>(), step.num_rows};
  route(*threads_, routing);
  experts.begin({layer.layer, step.num_rows, float_type(is_bfloat16_), buffers_.normed.data(), routing.ids,
                 routing.weights, routing.top_k});
}

void DecoderLayers::compute_mlp(const StepRows& step, const MlpWeights& mlp) {
  const uint32_t intermediate = mlp.down.matrix->in_features();
  multiply(step, mlp.gate_up, buffers_.normed, buffers_.gate_up);
  buffers_.activated.grow(size_t{step.num_rows} * intermediate * element_bytes_);
  gate(*threads_, {is_bfloat16_, buffers_.gate_up.data(), buffers_.activated.data(), intermediate}, step.num_rows);
  multiply(step, mlp.down, buffers_.activated, buffers_.dense);
}

DecoderLayers::Update DecoderLayers::compute_ffn(const StepRows& step, const LayerWeights& layer,
                                                 RoutedExperts* experts) {
  const bool has_experts = layer.router.weight != nullptr;
  const bool has_mlp = layer.mlp.down.matrix != nullptr;
  if (has_experts) ask_experts(step, layer, *experts);
  if (has_mlp) compute_mlp(step, layer.mlp);
  if (!has_experts) return {buffers_.dense.data(), is_bfloat16_};
  const size_t count = size_t{step.num_rows} * hidden_size_;
  buffers_.answer.grow(count * sizeof(float));
  experts->finish(buffers_.answer.as<float>());
  if (has_mlp) add_dense(count);
  return {buffers_.answer.data(), false};
}

// What experts have answered, and the always active ones.
void DecoderLayers::add_dense(size_t count) {
  float* const answer = buffers_.answer.as<float>();
  const float* dense = buffers_.dense.as<float>();
  if (is_bfloat16_) {
    threads_->shared().grow(count * sizeof(float));
    threads_->vectors().bfloat16_to_float32(buffers_.dense.as<uint16_t>(), threads_->shared().as<float>(), count);
    dense = threads_->shared().as<float>();
  }
  for (size_t i = 0; i < count; ++i) answer[i] += dense[i];
}

void DecoderLayers::copy_update(const StepRows& step, const Update& update) const {
  const size_t element = update.is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
  std::memcpy(step.update, update.values, size_t{step.num_rows} * hidden_size_ * element);
}

}  // namespace moebius::dense
