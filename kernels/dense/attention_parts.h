// Attention of one row in parts of the positions that it sees, which threads compute apart.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dense/dense_threads.h"

namespace moebius::dense {

// What a part leaves for the query heads of one key head: [group] maxima, [group] sums, [group][value_dim] outputs.
class Partial {
 public:
  Partial(float* memory, uint32_t group) : memory_(memory), group_(group) {}
  static size_t floats(uint32_t group, uint32_t value_dim) { return size_t{group} * (value_dim + 2); }

  float* maxima() const { return memory_; }
  float* sums() const { return memory_ + group_; }
  float* output() const { return memory_ + size_t{2} * group_; }

 private:
  float* memory_;
  uint32_t group_;
};

// The parts of one row for the query heads of one key head.
struct RowParts {
  float* memory;      // [num_parts] partials
  uint32_t num_parts;
  uint32_t group;
  uint32_t value_dim;

  Partial part(uint32_t index) const { return {memory + index * Partial::floats(group, value_dim), group}; }
};

// output[num_heads][value_dim], float32 or bfloat16 = value_scale * the values of each head, weighed by the softmax over
// all parts and the head's sink, a logit without a value; null: none has one.
void join_parts(DenseThreads& threads, uint32_t worker, const RowParts& parts, uint32_t num_heads, const float* sinks,
                float value_scale, bool is_bfloat16, std::byte* output);

// count elements at `source`, float32 or bfloat16, as float32.
void read_floats(const DenseThreads& threads, bool is_bfloat16, const void* source, float* target, size_t count);
// The other way; rounded to nearest even.
void write_floats(const DenseThreads& threads, bool is_bfloat16, const float* source, void* target, size_t count);

}  // namespace moebius::dense
