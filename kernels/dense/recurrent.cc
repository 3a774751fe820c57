#include "kernels/dense/recurrent.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "kernels/dense/attention_parts.h"
#include "kernels/dense/row_memory.h"
#include "kernels/format/numbers.h"

namespace moebius::dense {
namespace {

// Channels of a task of a convolution, a multiple of all vectors.
constexpr uint32_t kChannelsTogether = 1024;
// Likewise of a selective state space, whose channels have a state each.
constexpr uint32_t kScannedTogether = 256;

float value_at(const void* memory, size_t element, bool is_bfloat16) {
  if (is_bfloat16) return decode_bfloat16(static_cast<const uint16_t*>(memory)[element]);
  return static_cast<const float*>(memory)[element];
}

// A straight line above 20, as torch's.
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Of one head of one row: as many as a key has elements.
void find_decays(DenseThreads& threads, const DeltaRule& call, uint32_t row, uint32_t head, float* decays) {
  const DecayRule& rule = call.decay;
  const float rate = std::exp(rule.a_log[head]);
  if (!rule.is_by_element) {
    const float step = softplus(value_at(call.a, row * call.a_stride + head, call.is_bfloat16) + rule.dt_bias[head]);
    std::fill_n(decays, call.key_dim, std::exp(-rate * step));
    return;
  }
  const size_t first = size_t{head} * call.key_dim;
  threads.row_kernels().compute_decays({call.is_bfloat16, at(call.a, row * call.a_stride + first, call.is_bfloat16),
                                        rule.dt_bias + first, rate, rule.bound, decays, call.key_dim});
}

// All rows of one head, in order.
void step_head(DenseThreads& threads, const StateSpace& call, uint32_t head, float* scratch) {
  const size_t inner = size_t{call.num_heads} * call.head_dim;
  const size_t group = head / (call.num_heads / call.num_groups);
  const size_t state_size = size_t{call.state_dim} * call.head_dim;
  const float rate = std::exp(call.step.a_log[head]);
  for (uint32_t row = 0; row < call.num_rows; ++row) {
    const size_t own = row * call.xbc_stride;
    const size_t write = own + inner + group * call.state_dim;
    const float dt = call.dt == nullptr ? 0.0f : value_at(call.dt, row * call.dt_stride + head, call.is_bfloat16);
    const float step = softplus(dt + call.step.dt_bias[head]);
    const auto state = [&](int64_t slot) {
      return call.states + (static_cast<size_t>(slot) * call.num_heads + head) * state_size;
    };
    threads.row_kernels().update_state_space(
        {call.is_bfloat16, at(call.xbc, write + size_t{call.num_groups} * call.state_dim, call.is_bfloat16),
         at(call.xbc, write, call.is_bfloat16), at(call.xbc, own + size_t{head} * call.head_dim, call.is_bfloat16),
         state(call.reads[row]), state(call.writes[row]),
         call.output + (size_t{row} * call.num_heads + head) * call.head_dim, scratch, std::exp(-rate * step), step,
         call.step.skip[head], call.state_dim, call.head_dim});
  }
}

// All rows of some channels, in order.
void scan_channels(DenseThreads& threads, const SelectiveScan& call, uint32_t first, uint32_t count, float* scratch) {
  const bool is_bfloat16 = call.is_bfloat16;
  float* const write = scratch + 3 * size_t{count};
  float* const read = write + call.state_dim;
  for (uint32_t row = 0; row < call.num_rows; ++row) {
    const auto own = [&](const RowColumns& columns, uint32_t column) {
      return at(columns.values, row * columns.stride + column, is_bfloat16);
    };
    const auto state = [&](int64_t slot) {
      return call.states + (static_cast<size_t>(slot) * call.channels + first) * call.state_dim;
    };
    read_floats(threads, is_bfloat16, own(call.write, 0), write, call.state_dim);
    read_floats(threads, is_bfloat16, own(call.read, 0), read, call.state_dim);
    threads.row_kernels().scan({is_bfloat16, own(call.values, first), own(call.steps, first), own(call.gates, first),
                                write, read, call.a_log + size_t{first} * call.state_dim, call.skip + first,
                                state(call.reads[row]), state(call.writes[row]),
                                at(call.output, size_t{row} * call.channels + first, is_bfloat16), scratch, count,
                                call.state_dim});
  }
}

// All rows of one value head, in order.
void update_head(DenseThreads& threads, const DeltaRule& call, uint32_t head, float* scratch) {
  float* const decays = scratch + 3 * size_t{call.key_dim};
  const uint32_t key_head = head / (call.num_value_heads / call.num_key_heads);
  const size_t key_size = size_t{call.num_key_heads} * call.key_dim;
  const size_t state_size = size_t{call.key_dim} * call.value_dim;
  for (uint32_t row = 0; row < call.num_rows; ++row) {
    const size_t own = row * call.qkv_stride;
    const size_t query = own + size_t{key_head} * call.key_dim;
    const size_t value = own + 2 * key_size + size_t{head} * call.value_dim;
    const float beta = 1.0f / (1.0f + std::exp(-value_at(call.b, row * call.b_stride + head, call.is_bfloat16)));
    find_decays(threads, call, row, head, decays);
    const auto state = [&](int64_t slot) {
      return call.states + (static_cast<size_t>(slot) * call.num_value_heads + head) * state_size;
    };
    void* const output = at(call.output, (size_t{row} * call.num_value_heads + head) * call.value_dim,
                            call.is_bfloat16);
    threads.row_kernels().update_delta(
        {call.is_bfloat16, at(call.qkv, query, call.is_bfloat16), at(call.qkv, query + key_size, call.is_bfloat16),
         at(call.qkv, value, call.is_bfloat16), state(call.reads[row]), state(call.writes[row]), output, scratch,
         decays, beta, call.key_dim, call.value_dim});
  }
}

}  // namespace

void convolve(DenseThreads& threads, const Convolution& call) {
  const std::lock_guard<std::mutex> lock(threads.call_mutex());
  const bool is_bfloat16 = call.is_bfloat16;
  const size_t state_size = size_t{call.width - 1} * call.channels;
  const uint32_t num_tasks = (call.channels + kChannelsTogether - 1) / kChannelsTogether;
  threads.pool().parallel_for(num_tasks, [&](uint32_t task, uint32_t) {
    const uint32_t begin = task * kChannelsTogether;
    const uint32_t count = std::min(kChannelsTogether, call.channels - begin);
    for (uint32_t row = 0; row < call.num_rows; ++row) {
      const auto recent = [&](int64_t slot) {
        return at(call.states, static_cast<size_t>(slot) * state_size + begin, is_bfloat16);
      };
      const auto own = [&](const void* rows) {
        return rows == nullptr ? nullptr : at(rows, row * call.row_stride + begin, is_bfloat16);
      };
      threads.row_kernels().convolve({is_bfloat16, call.activates, own(call.rows), own(call.input_gates),
                                      own(call.output_gates), recent(call.reads[row]), recent(call.writes[row]),
                                      call.taps + begin, call.bias == nullptr ? nullptr : call.bias + begin,
                                      at(call.output, size_t{row} * call.channels + begin, is_bfloat16), count,
                                      call.channels, call.width});
    }
  });
}

void update_delta(DenseThreads& threads, const DeltaRule& call) {
  const std::lock_guard<std::mutex> lock(threads.call_mutex());
  threads.pool().parallel_for(call.num_value_heads, [&](uint32_t head, uint32_t worker) {
    AlignedBuffer& scratch = threads.scratch(worker).result;
    scratch.grow(4 * size_t{call.key_dim} * sizeof(float));
    update_head(threads, call, head, scratch.as<float>());
  });
}

void update_state_space(DenseThreads& threads, const StateSpace& call) {
  const std::lock_guard<std::mutex> lock(threads.call_mutex());
  threads.pool().parallel_for(call.num_heads, [&](uint32_t head, uint32_t worker) {
    AlignedBuffer& scratch = threads.scratch(worker).result;
    scratch.grow(2 * size_t{call.state_dim} * sizeof(float));
    step_head(threads, call, head, scratch.as<float>());
  });
}

void scan(DenseThreads& threads, const SelectiveScan& call) {
  const std::lock_guard<std::mutex> lock(threads.call_mutex());
  const uint32_t num_tasks = (call.channels + kScannedTogether - 1) / kScannedTogether;
  threads.pool().parallel_for(num_tasks, [&](uint32_t task, uint32_t worker) {
    const uint32_t first = task * kScannedTogether;
    const uint32_t count = std::min(kScannedTogether, call.channels - first);
    AlignedBuffer& scratch = threads.scratch(worker).result;
    scratch.grow((3 * size_t{count} + 2 * size_t{call.state_dim}) * sizeof(float));
    scan_channels(threads, call, first, count, scratch.as<float>());
  });
}

void gated_group_norm(DenseThreads& threads, const GatedGroupNorm& call) {
  const bool is_bfloat16 = call.first.is_bfloat16;
  const size_t size = call.first.size;
  for_rows(threads, call.num_rows, call.num_groups * size, [&](uint32_t row, uint32_t worker) {
    AlignedBuffer& scratch = threads.scratch(worker).result;
    scratch.grow(size * sizeof(float));
    for (uint32_t group = 0; group < call.num_groups; ++group) {
      const size_t own = (size_t{row} * call.num_groups + group) * size;
      GatedGroupNormWork work = call.first;
      work.values = call.first.values + own;
      work.gates = at(call.first.gates, row * call.gates_stride + group * size, is_bfloat16);
      work.weight = at(call.first.weight, group * size, is_bfloat16);
      work.scratch = scratch.as<float>();
      work.output = at(call.first.output, own, is_bfloat16);
      threads.row_kernels().gated_group_norm(work);
    }
  });
}

void gated_norm(DenseThreads& threads, const GatedNorm& call) {
  const bool is_bfloat16 = call.first.is_bfloat16;
  const size_t size = call.first.size;
  for_rows(threads, call.num_rows, call.num_heads * size, [&](uint32_t row, uint32_t) {
    for (uint32_t head = 0; head < call.num_heads; ++head) {
      const size_t own = (size_t{row} * call.num_heads + head) * size;
      GatedNormWork work = call.first;
      work.values = at(call.first.values, own, is_bfloat16);
      work.gates = at(call.first.gates, row * call.gates_stride + head * size, is_bfloat16);
      work.output = at(call.first.output, own, is_bfloat16);
      threads.row_kernels().gated_norm(work);
    }
  });
}

void apply_gate(DenseThreads& threads, const ApplyGateWork& first, size_t gates_stride, uint32_t num_rows) {
  for_rows(threads, num_rows, first.size, [&](uint32_t row, uint32_t) {
    ApplyGateWork work = first;
    work.values = at(first.values, size_t{row} * first.size, first.is_bfloat16);
    work.gates = at(first.gates, row * gates_stride, first.is_bfloat16);
    work.output = at(first.output, size_t{row} * first.size, first.is_bfloat16);
    threads.row_kernels().apply_gate(work);
  });
}

}  // namespace moebius::dense
