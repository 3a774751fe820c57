#include "kernels/dense/row_ops.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "kernels/dense/attention_parts.h"
#include "kernels/dense/row_memory.h"

namespace moebius::dense {

void add_norm(DenseThreads& threads, const NormWork& first, uint32_t num_rows) {
  const RowKernels& kernels = threads.row_kernels();
  for_rows(threads, num_rows, first.size, [&](uint32_t row, uint32_t) {
    NormWork work = first;
    const size_t begin = size_t{row} * first.size;
    work.residual = at(first.residual, begin, first.is_bfloat16);
    work.update = first.update == nullptr ? nullptr : at(first.update, begin, first.update_is_bfloat16);
    work.output = at(first.output, begin, first.is_bfloat16);
    kernels.add_norm(work);
  });
}

void norm_rows(DenseThreads& threads, const NormWork& first, size_t stride, size_t output_stride, uint32_t num_rows) {
  const RowKernels& kernels = threads.row_kernels();
  for_rows(threads, num_rows, first.size, [&](uint32_t row, uint32_t) {
    NormWork work = first;
    work.residual = at(first.residual, row * stride, first.is_bfloat16);
    work.output = at(first.output, row * output_stride, first.is_bfloat16);
    kernels.add_norm(work);
  });
}

void gate(DenseThreads& threads, const GateWork& first, uint32_t num_rows) {
  const RowKernels& kernels = threads.row_kernels();
  for_rows(threads, num_rows, 4 * size_t{first.size}, [&](uint32_t row, uint32_t) {
    GateWork work = first;
    work.gate_up = at(first.gate_up, (first.is_squared_relu ? 1 : 2) * size_t{row} * first.size, first.is_bfloat16);
    work.output = at(first.output, size_t{row} * first.size, first.is_bfloat16);
    kernels.gate(work);
  });
}

void silu(DenseThreads& threads, const SiluWork& first, size_t stride, uint32_t num_rows) {
  const RowKernels& kernels = threads.row_kernels();
  for_rows(threads, num_rows, 4 * size_t{first.size}, [&](uint32_t row, uint32_t) {
    SiluWork work = first;
    work.values = at(first.values, row * stride, first.is_bfloat16);
    work.output = at(first.output, size_t{row} * first.size, first.is_bfloat16);
    kernels.silu(work);
  });
}

void rotate_row(DenseThreads& threads, const RotateWork& first, size_t heads_stride, uint32_t row, uint32_t worker) {
  AlignedBuffer& scratch = threads.scratch(worker).result;
  scratch.grow(first.head_dim * sizeof(float));
  RotateWork work = first;
  work.heads = at(first.heads, row * heads_stride, first.is_bfloat16);
  work.cosine = at(first.cosine, size_t{row} * first.rotary_dim, first.is_bfloat16);
  work.sine = at(first.sine, size_t{row} * first.rotary_dim, first.is_bfloat16);
  work.scratch = scratch.as<float>();
  threads.row_kernels().rotate(work);
}

void rotate(DenseThreads& threads, const RotateWork& first, size_t heads_stride, uint32_t num_rows) {
  for_rows(threads, num_rows, 2 * size_t{first.num_heads} * first.head_dim, [&](uint32_t row, uint32_t worker) {
    rotate_row(threads, first, heads_stride, row, worker);
  });
}

void rotate_and_append(DenseThreads& threads, const RotateAppend& call) {
  const RotateWork& first = call.first;
  const bool is_bfloat16 = first.is_bfloat16;
  const uint32_t key_size = (first.num_heads - first.num_query_heads) * first.head_dim;
  const PageStorage& storage = call.storage;
  const size_t bytes = key_size * page_element_bytes(storage, is_bfloat16);
  const RowKernels& kernels = threads.row_kernels();
  for_rows(threads, call.num_rows, 2 * size_t{first.num_heads} * first.head_dim, [&](uint32_t row, uint32_t worker) {
    rotate_row(threads, first, call.heads_stride, row, worker);
    const size_t keys = row * call.heads_stride + size_t{first.num_query_heads} * first.head_dim;
    const size_t before = static_cast<size_t>(call.slot_mapping[row]) * 2 * bytes;
    std::byte* const slot = static_cast<std::byte*>(call.slots) + before;
    store_in_page(kernels, is_bfloat16, storage.is_float8, storage.key_scale, at(first.heads, keys, is_bfloat16), slot,
                  key_size);
    store_in_page(kernels, is_bfloat16, storage.is_float8, storage.value_scale,
                  at(call.values, row * call.values_stride, is_bfloat16), slot + bytes, key_size);
  });
}

// --- attention

namespace {

// Positions of a part of a sequence. Always the same, so that a row's bits depend on no other row or thread.
constexpr uint32_t kPartPositions = 512;

class AttentionRun {
 public:
  AttentionRun(DenseThreads& threads, const Attention& call)
      : threads_(threads),
        call_(call),
        group_(call.num_heads / call.num_kv_heads),
        partial_floats_(Partial::floats(group_, call.head_dim)) {
    for (uint32_t row = 0; row < call.num_rows; ++row) splits_ = std::max(splits_, splits_of(row));
  }

  void run() {
    const std::lock_guard<std::mutex> lock(threads_.call_mutex());
    const uint32_t pairs = call_.num_rows * call_.num_kv_heads;
    threads_.shared().grow(size_t{pairs} * splits_ * partial_floats_ * sizeof(float));
    threads_.pool().run_phases(
        pool_phase(pairs * splits_, [&](uint32_t task, uint32_t worker) { attend_part(task, worker); }),
        pool_phase(pairs, [&](uint32_t pair, uint32_t worker) { join(pair, worker); }));
  }

 private:
  RowParts parts(uint32_t pair) const {
    float* const memory = threads_.shared().as<float>() + size_t{pair} * splits_ * partial_floats_;
    return {memory, splits_of(pair / call_.num_kv_heads), group_, call_.head_dim};
  }

  void attend_part(uint32_t task, uint32_t worker) {
    const uint32_t pair = task / splits_;
    const uint32_t split = task % splits_;
    const uint32_t row = pair / call_.num_kv_heads;
    const uint32_t head = pair % call_.num_kv_heads;
    const auto begin = static_cast<uint32_t>(call_.begins[row]);
    const auto end = static_cast<uint32_t>(call_.ends[row]);
    if (split >= splits_of(row)) return;
    AlignedBuffer& scratch = threads_.scratch(worker).result;
    const size_t query_floats = size_t{group_} * call_.head_dim;
    scratch.grow((query_floats + size_t{group_} * kAttendBlock) * sizeof(float));
    const Partial result = parts(pair).part(split);
    const size_t head_bytes = call_.head_dim * page_element_bytes(call_.storage, call_.is_bfloat16);
    const auto* const keys = static_cast<const std::byte*>(call_.pages) + head * head_bytes;
    read_query(row, head, scratch.as<float>());
    threads_.row_kernels().attend({page_type(call_.storage, call_.is_bfloat16), scratch.as<float>(), keys,
                                   keys + call_.num_kv_heads * head_bytes, 2 * call_.num_kv_heads * head_bytes,
                                   call_.block_table + call_.requests[row] * call_.table_stride, call_.page_size,
                                   begin + split * kPartPositions, std::min(begin + (split + 1) * kPartPositions, end),
                                   group_, call_.head_dim, call_.head_dim, scratch.as<float>() + query_floats,
                                   result.output(), result.maxima(), result.sums()});
  }

  uint32_t splits_of(uint32_t row) const {
    return static_cast<uint32_t>(call_.ends[row] - call_.begins[row] + kPartPositions - 1) / kPartPositions;
  }

  void read_query(uint32_t row, uint32_t head, float* target) const {
    const size_t count = size_t{group_} * call_.head_dim;
    const std::byte* const source = at(call_.query, row * call_.query_stride + head * count, call_.is_bfloat16);
    read_floats(threads_, call_.is_bfloat16, source, target, count);
    const float factor = call_.scale * call_.storage.key_scale;
    for (size_t i = 0; i < count; ++i) target[i] *= factor;
  }

  // Heads of a row lie in the order of their pairs.
  void join(uint32_t pair, uint32_t worker) {
    const size_t first = size_t{pair % call_.num_kv_heads} * group_;
    join_parts(threads_, worker, parts(pair), group_, call_.sinks == nullptr ? nullptr : call_.sinks + first,
               call_.storage.value_scale, call_.is_bfloat16,
               at(call_.output, size_t{pair} * group_ * call_.head_dim, call_.is_bfloat16));
  }

  DenseThreads& threads_;
  const Attention& call_;
  uint32_t group_;
  size_t partial_floats_;
  uint32_t splits_ = 1;
};

}  // namespace

void attend(DenseThreads& threads, const Attention& call) {
  if (call.num_rows > 0) AttentionRun(threads, call).run();
}

}  // namespace moebius::dense
