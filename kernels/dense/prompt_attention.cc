#include "kernels/dense/prompt_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "kernels/dense/attention_parts.h"
#include "kernels/dense/row_memory.h"

namespace moebius::dense {
namespace {

// Queries of a tile: enough that widening keys and values costs little beside the products, and that queries, scores
// and outputs of common head sizes still lie in the second-level cache.
constexpr uint32_t kMostLanes = 128;

// Scratch of one tile, in floats; see AttendTileWork.
struct TileMemory {
  TileMemory(AlignedBuffer& buffer, uint32_t lanes, uint32_t head_dim) {
    const size_t columns = size_t{head_dim} * lanes;
    buffer.grow((2 * columns + size_t{kAttendBlock} * (head_dim + lanes) + 5 * size_t{lanes}) * sizeof(float));
    query = buffer.as<float>();
    output = query + columns;
    scores = output + columns;
    block = scores + size_t{kAttendBlock} * lanes;
    begins = block + size_t{kAttendBlock} * head_dim;
    ends = begins + lanes;
    maxima = ends + lanes;
    sums = maxima + lanes;
    kept = sums + lanes;
  }

  float* query;
  float* output;
  float* scores;
  float* block;
  float* begins;
  float* ends;
  float* maxima;
  float* sums;
  float* kept;
};

class PromptRun {
 public:
  PromptRun(DenseThreads& threads, const Attention& call)
      : threads_(threads), call_(call), group_(call.num_heads / call.num_kv_heads) {}

  void run() {
    const std::lock_guard<std::mutex> lock(threads_.call_mutex());
    const uint32_t queries = call_.num_rows * group_;
    const uint32_t tiles = (queries + kMostLanes - 1) / kMostLanes;
    threads_.pool().parallel_for(tiles * call_.num_kv_heads, [&](uint32_t task, uint32_t worker) {
      // The last tiles see most and come first.
      const uint32_t first = (tiles - 1 - task / call_.num_kv_heads) * kMostLanes;
      attend(task % call_.num_kv_heads, first, std::min(kMostLanes, queries - first), worker);
    });
  }

 private:
  // Query `index` of a key head is of row index / group_.
  void attend(uint32_t key_head, uint32_t first, uint32_t count, uint32_t worker) {
    const uint32_t lanes = (count + kAttendLanes - 1) / kAttendLanes * kAttendLanes;
    const TileMemory memory(threads_.scratch(worker).result, lanes, call_.head_dim);
    read_queries(key_head, first, count, lanes, memory, threads_.scratch(worker).gemm);
    const size_t head_bytes = call_.head_dim * page_element_bytes(call_.storage, call_.is_bfloat16);
    const auto* const keys = static_cast<const std::byte*>(call_.pages) + key_head * head_bytes;
    const uint32_t row = first / group_;
    const uint32_t end_row = (first + count - 1) / group_ + 1;
    const auto [least_begin, most_begin] = std::minmax_element(call_.begins + row, call_.begins + end_row);
    const auto [least_end, most_end] = std::minmax_element(call_.ends + row, call_.ends + end_row);
    const AttendTileWork work{page_type(call_.storage, call_.is_bfloat16), memory.query, keys,
                              keys + call_.num_kv_heads * head_bytes, 2 * call_.num_kv_heads * head_bytes,
                              call_.block_table + call_.requests[0] * call_.table_stride, call_.page_size,
                              memory.begins, memory.ends, static_cast<uint32_t>(*least_begin),
                              static_cast<uint32_t>(*most_end), static_cast<uint32_t>(*most_begin),
                              static_cast<uint32_t>(*least_end), lanes, call_.head_dim, memory.block, memory.scores,
                              memory.kept, memory.output, memory.maxima, memory.sums};
    threads_.row_kernels().attend_tile(work);
    write_outputs(key_head, first, count, lanes, memory, threads_.scratch(worker).gemm);
  }

  // Lanes that are no query see nothing.
  void read_queries(uint32_t key_head, uint32_t first, uint32_t count, uint32_t lanes, const TileMemory& memory,
                    AlignedBuffer& buffer) const {
    const uint32_t head_dim = call_.head_dim;
    buffer.grow(head_dim * sizeof(float));
    float* const one = buffer.as<float>();
    std::memset(memory.query, 0, size_t{head_dim} * lanes * sizeof(float));
    std::fill_n(memory.begins, 2 * size_t{lanes}, 0.0f);  // and the ends, which follow
    const float factor = call_.scale * call_.storage.key_scale;
    for (uint32_t lane = 0; lane < count; ++lane) {
      const uint32_t row = (first + lane) / group_;
      const size_t head = size_t{key_head} * group_ + (first + lane) % group_;
      const size_t place = row * call_.query_stride + head * head_dim;
      memory.begins[lane] = static_cast<float>(call_.begins[row]);
      memory.ends[lane] = static_cast<float>(call_.ends[row]);
      read_floats(threads_, call_.is_bfloat16, at(call_.query, place, call_.is_bfloat16), one, head_dim);
      for (uint32_t d = 0; d < head_dim; ++d) memory.query[size_t{d} * lanes + lane] = one[d] * factor;
    }
  }

  // Divided by the softmax's sum, to which a sink adds its exponential.
  void write_outputs(uint32_t key_head, uint32_t first, uint32_t count, uint32_t lanes, const TileMemory& memory,
                     AlignedBuffer& buffer) const {
    const uint32_t head_dim = call_.head_dim;
    buffer.grow(head_dim * sizeof(float));
    float* const one = buffer.as<float>();
    for (uint32_t lane = 0; lane < count; ++lane) {
      const uint32_t row = (first + lane) / group_;
      const size_t head = size_t{key_head} * group_ + (first + lane) % group_;
      float factor = 1.0f;
      float total = memory.sums[lane];
      if (call_.sinks != nullptr) {
        // Relative to the larger of the two, so that neither exponential overflows.
        const float largest = std::max(memory.maxima[lane], call_.sinks[head]);
        factor = std::exp(memory.maxima[lane] - largest);
        total = total * factor + std::exp(call_.sinks[head] - largest);
      }
      factor *= call_.storage.value_scale;
      for (uint32_t d = 0; d < head_dim; ++d) one[d] = memory.output[size_t{d} * lanes + lane] * factor / total;
      const size_t place = (size_t{row} * call_.num_heads + head) * head_dim;
      write_floats(threads_, call_.is_bfloat16, one, at(call_.output, place, call_.is_bfloat16), head_dim);
    }
  }

  DenseThreads& threads_;
  const Attention& call_;
  uint32_t group_;
};

}  // namespace

void attend_prompt(DenseThreads& threads, const Attention& call) {
  if (call.num_rows > 0) PromptRun(threads, call).run();
}

}  // namespace moebius::dense
