#include "kernels/dense/decoder_layers.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "kernels/dense/attention_parts.h"
#include "kernels/dense/latent_attention.h"
#include "kernels/dense/row_memory.h"

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

void check_mixer(const AttentionWeights& attention, uint32_t hidden_size, size_t index) {
  const uint32_t heads = attention.num_heads * attention.head_dim;
  const uint32_t rest = 2 * attention.num_kv_heads * attention.head_dim;
  const bool has_gates = attention.qkv.matrix->out_features() != heads + rest;
  check_shape(attention.qkv, hidden_size, (has_gates ? 2 : 1) * heads + rest, index, "qkv");
  check_shape(attention.output, heads, hidden_size, index, "output");
  if (attention.gate.matrix == nullptr) return;
  const bool by_head = attention.gate.matrix->out_features() == attention.num_heads;
  check_shape(attention.gate, hidden_size, by_head ? attention.num_heads : heads, index, "gate");
}

void check_mixer(const LatentWeights& latent, uint32_t hidden_size, size_t index) {
  const uint32_t stored = latent.latent_dim + latent.rope_dim;
  const bool has_latents = latent.query_norm.weight != nullptr;
  const uint32_t query_in = latent.query.matrix->in_features();
  check_shape(latent.narrow, hidden_size, stored + (has_latents ? query_in : 0), index, "narrow");
  check_shape(latent.query, has_latents ? query_in : hidden_size,
              latent.num_heads * (latent.nope_dim + latent.rope_dim), index, "query");
  check_shape(latent.output, latent.num_heads * latent.value_dim, hidden_size, index, "output");
  if (latent.latent_dim % 16 == 0 && latent.rope_dim % 16 == 0) return;
  throw std::invalid_argument("layer " + std::to_string(index) + ": latents have " + std::to_string(latent.latent_dim) +
                              " + " + std::to_string(latent.rope_dim) + " elements; allowed: multiples of 16");
}

void check_mixer(const DeltaWeights& delta, uint32_t hidden_size, size_t index) {
  const uint32_t values = delta.num_value_heads * delta.value_dim;
  const uint32_t keys = delta.num_key_heads * delta.key_dim;
  const uint32_t num_decays = delta.num_value_heads * (delta.decay.is_by_element ? delta.key_dim : 1);
  uint32_t read = 2 * keys + values + delta.num_value_heads;
  for (const auto& [projection, columns] : {std::pair{&delta.decays, num_decays}, std::pair{&delta.gates, values}}) {
    const bool is_direct = projection->matrix == nullptr;
    read += is_direct ? columns : projection->matrix->in_features();
    if (!is_direct) check_shape(*projection, projection->matrix->in_features(), columns, index, "decays or gates");
  }
  check_shape(delta.input, hidden_size, read, index, "input");
  check_shape(delta.output, values, hidden_size, index, "output");
}

void check_mixer(const ShortConvWeights& conv, uint32_t hidden_size, size_t index) {
  check_shape(conv.input, hidden_size, 3 * conv.channels, index, "input");
  check_shape(conv.output, conv.channels, hidden_size, index, "output");
}

void check_mixer(const StateSpaceWeights& space, uint32_t hidden_size, size_t index) {
  const uint32_t inner = space.num_heads * space.head_dim;
  const uint32_t groups = space.num_groups * space.state_dim;
  check_shape(space.input, hidden_size, 2 * inner + 2 * groups + space.num_heads, index, "input");
  check_shape(space.output, inner, hidden_size, index, "output");
}

void check_mixer(const SelectiveScanWeights& scan, uint32_t hidden_size, size_t index) {
  const uint32_t step_rank = scan.steps.matrix->in_features();
  check_shape(scan.input, hidden_size, 2 * scan.channels, index, "input");
  check_shape(scan.narrow, scan.channels, step_rank + 2 * scan.state_dim, index, "narrow");
  check_shape(scan.steps, step_rank, scan.channels, index, "steps");
  check_shape(scan.output, scan.channels, hidden_size, index, "output");
}

void check_mixer(const LightningWeights& lightning, uint32_t hidden_size, size_t index) {
  const uint32_t values = lightning.num_heads * lightning.value_dim;
  check_shape(lightning.input, hidden_size, 2 * (values + lightning.num_heads * lightning.key_dim), index, "input");
  check_shape(lightning.output, values, hidden_size, index, "output");
}

void check_mixer(const NoMixer&, uint32_t, size_t) {}

void check_layer(const LayerWeights& layer, uint32_t hidden_size, size_t index) {
  std::visit([&](const auto& mixer) { check_mixer(mixer, hidden_size, index); }, layer.mixer);
  const RouterWeights& router = layer.router;
  if (router.inputs.matrix != nullptr) {
    const uint32_t latent_size = router.inputs.matrix->out_features();
    check_shape(router.inputs, hidden_size, latent_size, index, "inputs of experts");
    check_shape(router.outputs, latent_size, hidden_size, index, "outputs of experts");
  }
  if (layer.mlp.down.matrix == nullptr) return;
  const uint32_t intermediate = layer.mlp.down.matrix->in_features();
  const uint32_t products = layer.mlp.is_squared_relu ? 1 : 2;
  check_shape(layer.mlp.gate_up, hidden_size, products * intermediate, index, "gate_up");
  check_shape(layer.mlp.down, intermediate, hidden_size, index, "down");
}

template <class Element>
void put_in_order(const int64_t* order, const AlignedBuffer& from, AlignedBuffer& to, size_t columns,
                  uint32_t num_rows) {
  for (uint32_t row = 0; row < num_rows; ++row) {
    const Element* const source = from.as<Element>() + row * columns;
    Element* const target = to.as<Element>() + row * columns;
    for (size_t column = 0; column < columns; ++column) target[column] = source[order[column]];
  }
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
    if (layer.input_norm.weight != nullptr) {
      add_norm(step, layer.input_norm, update);
      std::visit([&](const auto& mixer) { mix(step, mixer); }, layer.mixer);
      update = {buffers_.dense.data(), is_bfloat16_};
      scale(update, layer.residual_scale, step.num_rows);
      if (const auto& stream = layer.normed_stream) restart(step, update, stream->mixer_kept, stream->mixer_added);
    }
    if (layer.ffn_norm.weight == nullptr) continue;
    add_norm(step, layer.ffn_norm, update);
    update = compute_ffn(step, layer, experts);
    scale(update, layer.residual_scale, step.num_rows);
    if (const auto& stream = layer.normed_stream) restart(step, update, stream->ffn_kept, stream->ffn_added);
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
  multiply_columns(step, projection, rows.data(), projection.matrix->in_features(), output);
}

void DecoderLayers::multiply_columns(const StepRows& step, const Projection& projection, const std::byte* columns,
                                     size_t stride, AlignedBuffer& output) {
  DenseMatrix& matrix = *projection.matrix;
  const size_t bytes = size_t{step.num_rows} * matrix.out_features() * element_bytes_;
  output.grow(bytes);
  AlignedBuffer& product = projection.order == nullptr ? output : buffers_.unordered;
  product.grow(bytes);
  matrix.multiply({columns, stride, step.num_rows, float_type(is_bfloat16_), product.data(), matrix.out_features(),
                   float_type(is_bfloat16_), projection.bias});
  if (projection.order == nullptr) return;
  const auto put = is_bfloat16_ ? &put_in_order<uint16_t> : &put_in_order<float>;
  put(projection.order, product, output, matrix.out_features(), step.num_rows);
}

void DecoderLayers::mix(const StepRows& step, const AttentionWeights& attention) {
  const uint32_t head_dim = attention.head_dim;
  const uint32_t rotated = attention.num_heads + attention.num_kv_heads;
  const size_t stride = attention.qkv.matrix->out_features();
  const Rotation rotation = attention.rotation ? step.rotations[*attention.rotation] : Rotation{};
  const Sight& sight = step.sights[attention.sight];
  multiply(step, attention.qkv, buffers_.normed, buffers_.projected);
  std::byte* const projected = buffers_.projected.data();
  if (attention.norms_are_full_width) norm_full_width(step, attention, stride);
  const bool by_head = !attention.norms_are_full_width;
  const RotateWork first{is_bfloat16_,
                         attention.norms_are_bfloat16,
                         projected,
                         by_head ? attention.query_norm : nullptr,
                         by_head ? attention.key_norm : nullptr,
                         rotation.cosine,
                         rotation.sine,
                         nullptr,
                         attention.norm_eps,
                         rotated,
                         attention.num_heads,
                         head_dim,
                         head_dim,
                         rotation.rotary_dim,
                         rotation.interleaved};
  rotate_and_append(*threads_, {first, stride, step.num_rows, projected + size_t{rotated} * head_dim * element_bytes_,
                                stride, attention.pages, step.slot_mapping, attention.storage});
  buffers_.attended.grow(size_t{step.num_rows} * attention.num_heads * head_dim * element_bytes_);
  dense::attend(*threads_, {is_bfloat16_, projected, stride, attention.pages, step.block_table, step.table_stride,
                            step.requests, sight.begins, sight.ends, attention.sinks, buffers_.attended.data(),
                            attention.scale, step.num_rows, attention.num_heads, attention.num_kv_heads, head_dim,
                            attention.page_size, attention.storage});
  weigh(step, attention, stride);
  multiply(step, attention.output, buffers_.attended, buffers_.dense);
}

// Queries of all heads together, and keys likewise.
void DecoderLayers::norm_full_width(const StepRows& step, const AttentionWeights& attention, size_t stride) {
  const uint32_t query_size = attention.num_heads * attention.head_dim;
  const uint32_t key_size = attention.num_kv_heads * attention.head_dim;
  const auto norm = [&](size_t begin, const void* weight, uint32_t size) {
    std::byte* const heads = at(buffers_.projected.data(), begin, is_bfloat16_);
    norm_rows(
        *threads_,
        {is_bfloat16_, false, attention.norms_are_bfloat16, heads, nullptr, weight, heads, attention.norm_eps, size},
        stride, stride, step.num_rows);
  };
  norm(0, attention.query_norm, query_size);
  norm(query_size, attention.key_norm, key_size);
}

// By the gates of what is attended to, where there are any.
void DecoderLayers::weigh(const StepRows& step, const AttentionWeights& attention, size_t stride) {
  const uint32_t size = attention.num_heads * attention.head_dim;
  const size_t projected = size + 2 * size_t{attention.num_kv_heads} * attention.head_dim;
  std::byte* const attended = buffers_.attended.data();
  ApplyGateWork work{is_bfloat16_, attention.gates_are_softplus, attended, nullptr, attended, size, size};
  if (stride > projected) {
    work.gates = at(buffers_.projected.data(), projected, is_bfloat16_);
    return apply_gate(*threads_, work, stride, step.num_rows);
  }
  if (attention.gate.matrix == nullptr) return;
  multiply(step, attention.gate, buffers_.normed, buffers_.gates);
  work.gates = buffers_.gates.data();
  work.num_gates = attention.gate.matrix->out_features();
  apply_gate(*threads_, work, work.num_gates, step.num_rows);
}

void DecoderLayers::mix(const StepRows& step, const LatentWeights& latent) {
  const uint32_t heads = latent.num_heads;
  const size_t head_size = latent.nope_dim + latent.rope_dim;
  const size_t stride = heads * head_size;
  const size_t absorbed_bytes = size_t{step.num_rows} * heads * latent.latent_dim * element_bytes_;
  multiply(step, latent.narrow, buffers_.normed, buffers_.narrow);
  project_latent_queries(step, latent);
  append_latents(step, latent);
  buffers_.absorbed.grow(absorbed_bytes);
  buffers_.attended_latents.grow(absorbed_bytes);
  buffers_.attended.grow(size_t{step.num_rows} * heads * latent.value_dim * element_bytes_);
  const size_t matrix = size_t{latent.nope_dim + latent.value_dim} * latent.latent_dim;
  const std::byte* const projected = buffers_.projected.data();
  absorb_queries(*threads_, {is_bfloat16_, projected, stride, head_size, latent.heads, matrix, buffers_.absorbed.data(),
                             step.num_rows, heads, latent.nope_dim, latent.latent_dim});
  attend_latents(*threads_, {is_bfloat16_, buffers_.absorbed.data(), at(projected, latent.nope_dim, is_bfloat16_),
                             stride, head_size, latent.pages, step.block_table, step.table_stride, step.requests,
                             step.sights[latent.sight].ends, latent.sinks, buffers_.attended_latents.data(),
                             latent.scale, step.num_rows, heads, latent.latent_dim, latent.rope_dim, latent.page_size,
                             latent.storage});
  project_values(*threads_,
                 {is_bfloat16_, buffers_.attended_latents.data(), size_t{heads} * latent.latent_dim, latent.latent_dim,
                  at(latent.heads, size_t{latent.nope_dim} * latent.latent_dim, is_bfloat16_), matrix,
                  buffers_.attended.data(), step.num_rows, heads, latent.value_dim, latent.latent_dim});
  multiply(step, latent.output, buffers_.attended, buffers_.dense);
}

// Queries of all heads, the last elements of each rotated.
void DecoderLayers::project_latent_queries(const StepRows& step, const LatentWeights& latent) {
  if (latent.query_norm.weight == nullptr) {
    multiply(step, latent.query, buffers_.normed, buffers_.projected);
  } else {
    const uint32_t rank = latent.query.matrix->in_features();
    buffers_.normed_narrow.grow(size_t{step.num_rows} * rank * element_bytes_);
    const NormWeights& norm = latent.query_norm;
    norm_rows(*threads_,
              {is_bfloat16_, false, norm.is_bfloat16, buffers_.narrow.data(), nullptr, norm.weight,
               buffers_.normed_narrow.data(), norm.eps, rank},
              latent.narrow.matrix->out_features(), rank, step.num_rows);
    multiply(step, latent.query, buffers_.normed_narrow, buffers_.projected);
  }
  if (!latent.rotation) return;
  const Rotation& rotation = step.rotations[*latent.rotation];
  const uint32_t head_size = latent.nope_dim + latent.rope_dim;
  const RotateWork first{is_bfloat16_,
                         false,
                         at(buffers_.projected.data(), latent.nope_dim, is_bfloat16_),
                         nullptr,
                         nullptr,
                         rotation.cosine,
                         rotation.sine,
                         nullptr,
                         0.0f,
                         latent.num_heads,
                         latent.num_heads,
                         latent.rope_dim,
                         head_size,
                         rotation.rotary_dim,
                         rotation.interleaved};
  rotate(*threads_, first, size_t{latent.num_heads} * head_size, step.num_rows);
}

void DecoderLayers::append_latents(const StepRows& step, const LatentWeights& latent) {
  const size_t stride = latent.narrow.matrix->out_features();
  const Rotation rotation = latent.rotation ? step.rotations[*latent.rotation] : Rotation{};
  const NormWeights& norm = latent.latent_norm;
  std::byte* const key = at(buffers_.narrow.data(), stride - latent.rope_dim, is_bfloat16_);
  std::byte* const row = at(buffers_.narrow.data(), stride - latent.rope_dim - latent.latent_dim, is_bfloat16_);
  dense::append_latents(
      *threads_, {{is_bfloat16_, false, norm.is_bfloat16, row, nullptr, norm.weight, nullptr, norm.eps, 0},
                  {is_bfloat16_, false, key, nullptr, nullptr, rotation.cosine, rotation.sine, nullptr, 0.0f, 1, 1,
                   latent.rope_dim, latent.rope_dim, rotation.rotary_dim, rotation.interleaved},
                  stride,
                  step.num_rows,
                  latent.latent_dim,
                  latent.rope_dim,
                  latent.pages,
                  step.slot_mapping,
                  latent.storage});
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
  for (const NotedChoices& noted : step.noted) {
    if (noted.layer == layer.layer) std::memcpy(noted.ids, routing.ids, chosen * sizeof(int32_t));
  }
  const bool has_space = router.inputs.matrix != nullptr;
  if (has_space) multiply(step, router.inputs, buffers_.normed, buffers_.latents);
  const AlignedBuffer& rows = has_space ? buffers_.latents : buffers_.normed;
  experts.begin({layer.layer, step.num_rows, float_type(is_bfloat16_), rows.data(), routing.ids, routing.weights,
                 routing.top_k});
}

void DecoderLayers::compute_mlp(const StepRows& step, const MlpWeights& mlp) {
  const uint32_t intermediate = mlp.down.matrix->in_features();
  multiply(step, mlp.gate_up, buffers_.normed, buffers_.gate_up);
  buffers_.activated.grow(size_t{step.num_rows} * intermediate * element_bytes_);
  gate(*threads_, {is_bfloat16_, mlp.is_squared_relu, buffers_.gate_up.data(), buffers_.activated.data(), intermediate},
       step.num_rows);
  multiply(step, mlp.down, buffers_.activated, buffers_.dense);
  if (mlp.output_gate != nullptr) weigh_mlp(step, mlp.output_gate);
}

void DecoderLayers::weigh_mlp(const StepRows& step, const void* output_gate) {
  buffers_.logits.grow(step.num_rows * sizeof(float));
  float* const logits = buffers_.logits.as<float>();
  score_experts(*threads_, {buffers_.normed.data(), is_bfloat16_, step.num_rows, hidden_size_, output_gate,
                            is_bfloat16_, nullptr, 1, logits});
  const void* gates = logits;
  if (is_bfloat16_) {
    buffers_.gates.grow(step.num_rows * element_bytes_);
    threads_->vectors().float32_to_bfloat16(logits, buffers_.gates.as<uint16_t>(), step.num_rows);
    gates = buffers_.gates.data();
  }
  std::byte* const dense = buffers_.dense.data();
  apply_gate(*threads_, {is_bfloat16_, false, dense, gates, dense, hidden_size_, 1}, 1, step.num_rows);
}

DecoderLayers::Update DecoderLayers::compute_ffn(const StepRows& step, const LayerWeights& layer,
                                                 RoutedExperts* experts) {
  const bool has_experts = layer.router.weight != nullptr;
  const bool has_mlp = layer.mlp.down.matrix != nullptr;
  if (has_experts) ask_experts(step, layer, *experts);
  if (has_mlp) compute_mlp(step, layer.mlp);
  if (!has_experts) return {buffers_.dense.data(), is_bfloat16_};
  const Projection& outputs = layer.router.outputs;
  const size_t count = size_t{step.num_rows} * hidden_size_;
  const size_t latents = outputs.matrix == nullptr ? 0 : size_t{step.num_rows} * outputs.matrix->in_features();
  buffers_.answer.grow(std::max(count, latents) * sizeof(float));
  experts->finish(buffers_.answer.as<float>());
  if (outputs.matrix != nullptr) return expand_answer(step, outputs, has_mlp);
  if (has_mlp) add_dense(count);
  return {buffers_.answer.data(), false};
}

// What experts have answered in their space, rounded, and what that is in the layer's, and the always active ones.
DecoderLayers::Update DecoderLayers::expand_answer(const StepRows& step, const Projection& outputs, bool has_mlp) {
  const size_t latents = size_t{step.num_rows} * outputs.matrix->in_features();
  write_floats(*threads_, is_bfloat16_, buffers_.answer.as<float>(), buffers_.latents.data(), latents);
  multiply(step, outputs, buffers_.latents, buffers_.expanded);
  if (has_mlp) {
    const size_t count = size_t{step.num_rows} * hidden_size_;
    threads_->shared().grow(2 * count * sizeof(float));
    float* const sum = threads_->shared().as<float>();
    float* const dense = sum + count;
    read_floats(*threads_, is_bfloat16_, buffers_.expanded.data(), sum, count);
    read_floats(*threads_, is_bfloat16_, buffers_.dense.data(), dense, count);
    for (size_t i = 0; i < count; ++i) sum[i] += dense[i];
    write_floats(*threads_, is_bfloat16_, sum, buffers_.expanded.data(), count);
  }
  return {buffers_.expanded.data(), is_bfloat16_};
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

void DecoderLayers::scale(const Update& update, float factor, uint32_t num_rows) {
  if (factor == 1.0f) return;
  const size_t count = size_t{num_rows} * hidden_size_;
  float* values = reinterpret_cast<float*>(update.values);
  if (update.is_bfloat16) {
    threads_->shared().grow(count * sizeof(float));
    values = threads_->shared().as<float>();
    threads_->vectors().bfloat16_to_float32(reinterpret_cast<const uint16_t*>(update.values), values, count);
  }
  for (size_t i = 0; i < count; ++i) values[i] *= factor;
  if (!update.is_bfloat16) return;
  threads_->vectors().float32_to_bfloat16(values, reinterpret_cast<uint16_t*>(update.values), count);
}

// The stream becomes what the half has read.
void DecoderLayers::restart(const StepRows& step, const Update& update, float kept, float added) {
  std::memcpy(step.residual, buffers_.normed.data(), size_t{step.num_rows} * hidden_size_ * element_bytes_);
  scale({static_cast<std::byte*>(step.residual), is_bfloat16_}, kept, step.num_rows);
  scale(update, added, step.num_rows);
}

void DecoderLayers::copy_update(const StepRows& step, const Update& update) const {
  const size_t element = update.is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
  std::memcpy(step.update, update.values, size_t{step.num_rows} * hidden_size_ * element);
}

}  // namespace moebius::dense
