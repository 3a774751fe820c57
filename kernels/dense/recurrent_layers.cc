// Mixers of decoder layers that keep a state of each request.
#include "kernels/dense/attention_parts.h"
#include "kernels/dense/decoder_layers.h"
#include "kernels/dense/recurrent.h"
#include "kernels/dense/row_memory.h"

namespace moebius::dense {

void DecoderLayers::mix(const StepRows& step, const DeltaWeights& delta) {
  const uint32_t values = delta.num_value_heads * delta.value_dim;
  const uint32_t channels = 2 * delta.num_key_heads * delta.key_dim + values;
  multiply(step, delta.input, buffers_.normed, buffers_.projected);
  const std::byte* const projected = buffers_.projected.data();
  const size_t stride = delta.input.matrix->out_features();
  buffers_.convolved.grow(size_t{step.num_rows} * channels * element_bytes_);
  buffers_.attended.grow(size_t{step.num_rows} * values * element_bytes_);
  convolve(*threads_,
           {is_bfloat16_, true, projected, nullptr, nullptr, stride, step.num_rows, channels, delta.width, delta.recent,
            step.state_reads, step.state_writes, delta.taps, delta.bias, buffers_.convolved.data()});
  const RowColumns a = project_columns(step, delta.input, delta.a_column, delta.decays, buffers_.decays);
  update_delta(*threads_, {is_bfloat16_, buffers_.convolved.data(), channels, a.values, a.stride,
                           at(projected, delta.b_column, is_bfloat16_), stride, delta.decay, delta.states,
                           step.state_reads, step.state_writes, buffers_.attended.data(), step.num_rows,
                           delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim});
  const RowColumns gates = project_columns(step, delta.input, delta.gate_column, delta.gates, buffers_.gates);
  const GatedNormWork first{is_bfloat16_, delta.gates_are_sigmoid,  buffers_.attended.data(), gates.values,
                            delta.norm,   buffers_.attended.data(), delta.norm_eps,           delta.value_dim};
  gated_norm(*threads_, {first, step.num_rows, delta.num_value_heads, gates.stride});
  multiply(step, delta.output, buffers_.attended, buffers_.dense);
}

// Columns of what `input` has projected, or what `next`, where there is one, makes of them.
RowColumns DecoderLayers::project_columns(const StepRows& step, const Projection& input, uint32_t begin,
                                          const Projection& next, AlignedBuffer& output) {
  const size_t stride = input.matrix->out_features();
  const std::byte* const columns = at(buffers_.projected.data(), begin, is_bfloat16_);
  if (next.matrix == nullptr) return {columns, stride};
  multiply_columns(step, next, columns, stride, output);
  return {output.data(), next.matrix->out_features()};
}

void DecoderLayers::mix(const StepRows& step, const StateSpaceWeights& space) {
  const uint32_t inner = space.num_heads * space.head_dim;
  const uint32_t channels = inner + 2 * space.num_groups * space.state_dim;
  const size_t stride = space.input.matrix->out_features();
  multiply(step, space.input, buffers_.normed, buffers_.projected);
  const std::byte* const gates = buffers_.projected.data();
  const std::byte* const rows = at(gates, inner, is_bfloat16_);
  buffers_.convolved.grow(size_t{step.num_rows} * channels * element_bytes_);
  buffers_.wide.grow(size_t{step.num_rows} * inner * sizeof(float));
  buffers_.attended.grow(size_t{step.num_rows} * inner * element_bytes_);
  convolve(*threads_,
           {is_bfloat16_, true, rows, nullptr, nullptr, stride, step.num_rows, channels, space.width, space.recent,
            step.state_reads, step.state_writes, space.taps, space.bias, buffers_.convolved.data()});
  update_state_space(*threads_,
                     {is_bfloat16_, buffers_.convolved.data(), channels, at(rows, channels, is_bfloat16_), stride,
                      space.step, space.states, step.state_reads, step.state_writes, buffers_.wide.as<float>(),
                      step.num_rows, space.num_groups, space.num_heads, space.state_dim, space.head_dim});
  const GatedGroupNormWork first{is_bfloat16_, buffers_.wide.as<float>(), gates,          space.norm,
                                 nullptr,      buffers_.attended.data(),  space.norm_eps, inner / space.num_groups};
  gated_group_norm(*threads_, {first, step.num_rows, space.num_groups, stride});
  multiply(step, space.output, buffers_.attended, buffers_.dense);
}

void DecoderLayers::mix(const StepRows& step, const LightningWeights& lightning) {
  const uint32_t heads = lightning.num_heads;
  const uint32_t values = heads * lightning.value_dim;
  const uint32_t channels = values + 2 * heads * lightning.key_dim;
  const size_t stride = lightning.input.matrix->out_features();
  multiply(step, lightning.input, buffers_.normed, buffers_.projected);
  const std::byte* const projected = buffers_.projected.data();
  buffers_.convolved.grow(size_t{step.num_rows} * channels * element_bytes_);
  buffers_.wide.grow(size_t{step.num_rows} * values * sizeof(float));
  buffers_.attended.grow(size_t{step.num_rows} * values * element_bytes_);
  std::byte* const attended = buffers_.attended.data();
  silu(*threads_, {is_bfloat16_, projected, buffers_.convolved.data(), channels}, stride, step.num_rows);
  update_state_space(*threads_, {is_bfloat16_, buffers_.convolved.data(), channels, nullptr, 0, lightning.step,
                                 lightning.states, step.state_reads, step.state_writes, buffers_.wide.as<float>(),
                                 step.num_rows, heads, heads, lightning.key_dim, lightning.value_dim});
  write_floats(*threads_, is_bfloat16_, buffers_.wide.as<float>(), attended, size_t{step.num_rows} * values);
  norm_rows(*threads_,
            {is_bfloat16_, false, lightning.norm.is_bfloat16, attended, nullptr, lightning.norm.weight, attended,
             lightning.norm.eps, values},
            values, values, step.num_rows);
  apply_gate(*threads_,
             {is_bfloat16_, false, attended, at(projected, channels, is_bfloat16_), attended, values, values}, stride,
             step.num_rows);
  multiply(step, lightning.output, buffers_.attended, buffers_.dense);
}

void DecoderLayers::mix(const StepRows& step, const SelectiveScanWeights& scan) {
  const uint32_t channels = scan.channels;
  const uint32_t step_rank = scan.steps.matrix->in_features();
  const uint32_t width = step_rank + 2 * scan.state_dim;
  const size_t stride = 2 * size_t{channels};
  multiply(step, scan.input, buffers_.normed, buffers_.projected);
  const std::byte* const projected = buffers_.projected.data();
  buffers_.convolved.grow(size_t{step.num_rows} * channels * element_bytes_);
  buffers_.attended.grow(size_t{step.num_rows} * channels * element_bytes_);
  buffers_.normed_narrow.grow(size_t{step.num_rows} * width * element_bytes_);
  convolve(*threads_,
           {is_bfloat16_, true, projected, nullptr, nullptr, stride, step.num_rows, channels, scan.width, scan.recent,
            step.state_reads, step.state_writes, scan.taps, scan.bias, buffers_.convolved.data()});
  multiply(step, scan.narrow, buffers_.convolved, buffers_.narrow);
  std::byte* const normed = buffers_.normed_narrow.data();
  const auto norm = [&](const NormWeights& weights, uint32_t begin, uint32_t size) {
    norm_rows(*threads_,
              {is_bfloat16_, false, weights.is_bfloat16, at(buffers_.narrow.data(), begin, is_bfloat16_), nullptr,
               weights.weight, at(normed, begin, is_bfloat16_), weights.eps, size},
              width, width, step.num_rows);
  };
  norm(scan.step_norm, 0, step_rank);
  norm(scan.write_norm, step_rank, scan.state_dim);
  norm(scan.read_norm, step_rank + scan.state_dim, scan.state_dim);
  multiply_columns(step, scan.steps, normed, width, buffers_.decays);
  dense::scan(*threads_, {is_bfloat16_,
                          {buffers_.convolved.data(), channels},
                          {buffers_.decays.data(), channels},
                          {at(normed, step_rank, is_bfloat16_), width},
                          {at(normed, step_rank + scan.state_dim, is_bfloat16_), width},
                          {at(projected, channels, is_bfloat16_), stride},
                          scan.a_log,
                          scan.skip,
                          scan.states,
                          step.state_reads,
                          step.state_writes,
                          buffers_.attended.data(),
                          step.num_rows,
                          channels,
                          scan.state_dim});
  multiply(step, scan.output, buffers_.attended, buffers_.dense);
}

void DecoderLayers::mix(const StepRows& step, const ShortConvWeights& conv) {
  multiply(step, conv.input, buffers_.normed, buffers_.projected);
  const std::byte* const gates = buffers_.projected.data();
  buffers_.convolved.grow(size_t{step.num_rows} * conv.channels * element_bytes_);
  convolve(*threads_, {is_bfloat16_, false, at(gates, 2 * size_t{conv.channels}, is_bfloat16_), gates,
                       at(gates, conv.channels, is_bfloat16_), conv.input.matrix->out_features(), step.num_rows,
                       conv.channels, conv.width, conv.recent, step.state_reads, step.state_writes, conv.taps,
                       conv.bias, buffers_.convolved.data()});
  multiply(step, conv.output, buffers_.convolved, buffers_.dense);
}

}  // namespace moebius::dense
