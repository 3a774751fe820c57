#include "kernels/dense/latent_attention.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "kernels/dense/attention_parts.h"
#include "kernels/dense/row_memory.h"
#include "kernels/dense/row_ops.h"

namespace moebius::dense {
namespace {

// Outputs of one head that are computed together.
constexpr uint32_t kOutputsTogether = 128;
// Query heads that read latents together: each reads them again from a cache, and few give threads enough to do.
constexpr uint32_t kHeadsOfTask = 8;
// Positions of a part are a multiple of the first, and parts of a row at most the second, which bounds what they leave:
// num_heads * latent_dim floats each. They follow from the row's own length, so that its bits depend on nothing else.
constexpr uint32_t kPartPositions = 256;
constexpr uint32_t kMostParts = 16;

uint32_t divide_up(uint32_t count, uint32_t by) { return (count + by - 1) / by; }

// compute(head, first output, outputs, rows [num_rows][depth], worker) for pieces of every head.
template <class Compute>
void for_heads(DenseThreads& threads, const HeadProducts& call, uint32_t depth, uint32_t outputs, Compute compute) {
  const uint32_t pieces = divide_up(outputs, kOutputsTogether);
  const size_t elements = size_t{depth} * std::min(outputs, kOutputsTogether);
  for_rows(threads, call.num_heads * pieces, elements, [&](uint32_t task, uint32_t worker) {
    const uint32_t head = task / pieces;
    const uint32_t first = task % pieces * kOutputsTogether;
    AlignedBuffer& scratch = threads.scratch(worker).result;
    scratch.grow(size_t{call.num_rows} * depth * sizeof(float));
    float* const rows = scratch.as<float>();
    for (uint32_t row = 0; row < call.num_rows; ++row) {
      const size_t place = row * call.row_stride + head * call.head_stride;
      read_floats(threads, call.is_bfloat16, at(call.rows, place, call.is_bfloat16), rows + size_t{row} * depth, depth);
    }
    compute(head, first, std::min(kOutputsTogether, outputs - first), rows);
  });
}

class LatentRun {
 public:
  LatentRun(DenseThreads& threads, const LatentAttention& call)
      : threads_(threads),
        call_(call),
        key_dim_(call.latent_dim + call.rope_dim),
        group_(std::min(call.num_heads, kHeadsOfTask)),
        groups_(divide_up(call.num_heads, group_)),
        partial_floats_(Partial::floats(group_, call.latent_dim)) {
    for (uint32_t row = 0; row < call.num_rows; ++row) most_parts_ = std::max(most_parts_, num_parts(row));
  }

  void run() {
    const std::lock_guard<std::mutex> lock(threads_.call_mutex());
    const uint32_t pairs = call_.num_rows * groups_;
    threads_.shared().grow(size_t{pairs} * most_parts_ * partial_floats_ * sizeof(float));
    threads_.pool().run_phases(
        pool_phase(pairs * most_parts_, [&](uint32_t task, uint32_t worker) { attend_part(task, worker); }),
        pool_phase(pairs, [&](uint32_t pair, uint32_t worker) { join(pair, worker); }));
  }

 private:
  uint32_t end(uint32_t row) const { return static_cast<uint32_t>(call_.ends[row]); }

  uint32_t part_positions(uint32_t row) const {
    return divide_up(divide_up(end(row), kMostParts), kPartPositions) * kPartPositions;
  }

  uint32_t num_parts(uint32_t row) const { return divide_up(end(row), part_positions(row)); }

  // Heads of the last group may be fewer.
  uint32_t num_heads(uint32_t pair) const { return std::min(group_, call_.num_heads - pair % groups_ * group_); }

  RowParts parts(uint32_t pair) const {
    float* const memory = threads_.shared().as<float>() + size_t{pair} * most_parts_ * partial_floats_;
    return {memory, num_parts(pair / groups_), group_, call_.latent_dim};
  }

  void attend_part(uint32_t task, uint32_t worker) {
    const uint32_t pair = task / most_parts_;
    const uint32_t index = task % most_parts_;
    const uint32_t row = pair / groups_;
    const RowParts own = parts(pair);
    if (index >= own.num_parts) return;
    AlignedBuffer& scratch = threads_.scratch(worker).result;
    const size_t query_floats = size_t{group_} * key_dim_;
    scratch.grow((query_floats + size_t{group_} * kAttendBlock) * sizeof(float));
    read_queries(pair, scratch.as<float>());
    const auto* const latents = static_cast<const std::byte*>(call_.pages);
    const uint32_t begin = index * part_positions(row);
    const Partial result = own.part(index);
    threads_.row_kernels().attend(
        {page_type(call_.storage, call_.is_bfloat16), scratch.as<float>(), latents, latents,
         key_dim_ * page_element_bytes(call_.storage, call_.is_bfloat16),
         call_.block_table + call_.requests[row] * call_.table_stride, call_.page_size, begin,
         std::min(begin + part_positions(row), end(row)), num_heads(pair), key_dim_, call_.latent_dim,
         scratch.as<float>() + query_floats, result.output(), result.maxima(), result.sums()});
  }

  // Each head's query of latents, then its rotated part, as a token's keys lie in a page.
  void read_queries(uint32_t pair, float* target) const {
    const uint32_t row = pair / groups_;
    const float factor = call_.scale * call_.storage.key_scale;
    for (uint32_t h = 0; h < num_heads(pair); ++h) {
      const size_t head = pair % groups_ * group_ + h;
      const size_t latent = (row * size_t{call_.num_heads} + head) * call_.latent_dim;
      const size_t rotated = row * call_.rope_row_stride + head * call_.rope_head_stride;
      float* const own = target + size_t{h} * key_dim_;
      read_floats(threads_, call_.is_bfloat16, at(call_.query, latent, call_.is_bfloat16), own, call_.latent_dim);
      read_floats(threads_, call_.is_bfloat16, at(call_.query_rope, rotated, call_.is_bfloat16), own + call_.latent_dim,
                  call_.rope_dim);
      for (uint32_t d = 0; d < key_dim_; ++d) own[d] *= factor;
    }
  }

  void join(uint32_t pair, uint32_t worker) {
    const size_t first = pair % groups_ * group_;
    const size_t place = (pair / groups_ * size_t{call_.num_heads} + first) * call_.latent_dim;
    join_parts(threads_, worker, parts(pair), num_heads(pair), call_.sinks == nullptr ? nullptr : call_.sinks + first,
               call_.storage.value_scale, call_.is_bfloat16, at(call_.output, place, call_.is_bfloat16));
  }

  DenseThreads& threads_;
  const LatentAttention& call_;
  uint32_t key_dim_;
  uint32_t group_;
  uint32_t groups_;
  size_t partial_floats_;
  uint32_t most_parts_ = 1;
};

}  // namespace

void absorb_queries(DenseThreads& threads, const HeadProducts& call) {
  const bool is_bfloat16 = call.is_bfloat16;
  const size_t stride = size_t{call.num_heads} * call.latent_dim;
  for_heads(threads, call, call.matrix_rows, call.latent_dim,
            [&](uint32_t head, uint32_t first, uint32_t columns, const float* rows) {
              threads.row_kernels().head_product(
                  {is_bfloat16, at(call.matrices, head * call.matrix_stride + first, is_bfloat16), call.latent_dim,
                   rows, at(call.output, size_t{head} * call.latent_dim + first, is_bfloat16), stride, call.num_rows,
                   call.matrix_rows, columns});
            });
}

void project_values(DenseThreads& threads, const HeadProducts& call) {
  const bool is_bfloat16 = call.is_bfloat16;
  const size_t stride = size_t{call.num_heads} * call.matrix_rows;
  for_heads(threads, call, call.latent_dim, call.matrix_rows,
            [&](uint32_t head, uint32_t first, uint32_t outputs, const float* rows) {
              const size_t begin = head * call.matrix_stride + size_t{first} * call.latent_dim;
              threads.row_kernels().transposed_head_product(
                  {is_bfloat16, at(call.matrices, begin, is_bfloat16), call.latent_dim, rows,
                   at(call.output, size_t{head} * call.matrix_rows + first, is_bfloat16), stride, call.num_rows,
                   outputs, call.latent_dim});
            });
}

void attend_latents(DenseThreads& threads, const LatentAttention& call) {
  if (call.num_rows > 0) LatentRun(threads, call).run();
}

void append_latents(DenseThreads& threads, const AppendLatents& call) {
  const bool is_bfloat16 = call.norm.is_bfloat16;
  const size_t width = size_t{call.latent_dim} + call.rope_dim;
  const PageStorage& storage = call.storage;
  const size_t stored_bytes = page_element_bytes(storage, is_bfloat16);
  const RowKernels& kernels = threads.row_kernels();
  for_rows(threads, call.num_rows, width, [&](uint32_t row, uint32_t worker) {
    std::byte* const slot =
        static_cast<std::byte*>(call.slots) + static_cast<size_t>(call.slot_mapping[row]) * width * stored_bytes;
    AlignedBuffer& normed = threads.scratch(worker).gemm;
    if (storage.is_float8) normed.grow(call.latent_dim * element_bytes(is_bfloat16));
    NormWork norm = call.norm;
    norm.residual = at(call.norm.residual, row * call.row_stride, is_bfloat16);
    norm.output = storage.is_float8 ? normed.data() : slot;
    norm.update = nullptr;
    norm.size = call.latent_dim;
    kernels.add_norm(norm);
    if (storage.is_float8) {
      store_in_page(kernels, is_bfloat16, true, storage.key_scale, normed.data(), slot, call.latent_dim);
    }
    std::byte* const key = at(call.rotation.heads, row * call.row_stride, is_bfloat16);
    if (call.rotation.cosine != nullptr) rotate_row(threads, call.rotation, call.row_stride, row, worker);
    store_in_page(kernels, is_bfloat16, storage.is_float8, storage.key_scale, key,
                  slot + call.latent_dim * stored_bytes, call.rope_dim);
  });
}

}  // namespace moebius::dense
