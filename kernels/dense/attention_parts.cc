#include "kernels/dense/attention_parts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/dense/row_memory.h"

namespace moebius::dense {

namespace {

void join_head(const RowParts& parts, uint32_t head, const float* sink, float* output) {
  float maximum = sink == nullptr ? -std::numeric_limits<float>::infinity() : *sink;
  for (uint32_t index = 0; index < parts.num_parts; ++index) {
    const float own = parts.part(index).maxima()[head];
    maximum = own > maximum || std::isnan(own) ? own : maximum;
  }
  float total = sink == nullptr ? 0.0f : std::exp(*sink - maximum);
  std::fill_n(output, parts.value_dim, 0.0f);
  for (uint32_t index = 0; index < parts.num_parts; ++index) {
    const Partial part = parts.part(index);
    const float share = std::exp(part.maxima()[head] - maximum);
    const float* const own = part.output() + size_t{head} * parts.value_dim;
    total += part.sums()[head] * share;
    for (uint32_t d = 0; d < parts.value_dim; ++d) output[d] += own[d] * share;
  }
  for (uint32_t d = 0; d < parts.value_dim; ++d) output[d] /= total;
}

}  // namespace

void join_parts(DenseThreads& threads, uint32_t worker, const RowParts& parts, uint32_t num_heads, const float* sinks,
                float value_scale, bool is_bfloat16, std::byte* output) {
  AlignedBuffer& scratch = threads.scratch(worker).result;
  scratch.grow(parts.value_dim * sizeof(float));
  float* const values = scratch.as<float>();
  for (uint32_t h = 0; h < num_heads; ++h) {
    join_head(parts, h, sinks == nullptr ? nullptr : sinks + h, values);
    for (uint32_t d = 0; d < parts.value_dim; ++d) values[d] *= value_scale;
    write_floats(threads, is_bfloat16, values, at(output, size_t{h} * parts.value_dim, is_bfloat16), parts.value_dim);
  }
}

void read_floats(const DenseThreads& threads, bool is_bfloat16, const void* source, float* target, size_t count) {
  if (is_bfloat16) {
    threads.vectors().bfloat16_to_float32(static_cast<const uint16_t*>(source), target, count);
  } else {
    std::memcpy(target, source, count * sizeof(float));
  }
}

void write_floats(const DenseThreads& threads, bool is_bfloat16, const float* source, void* target, size_t count) {
  if (is_bfloat16) {
    threads.vectors().float32_to_bfloat16(source, static_cast<uint16_t*>(target), count);
  } else {
    std::memcpy(target, source, count * sizeof(float));
  }
}

}  // namespace moebius::dense
