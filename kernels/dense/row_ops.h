// Steps of a layer around its products, over all rows of a step and on the threads of the dense layers.
//
// Floating-point memory is float32, or bfloat16 where the call says so; rows are contiguous where no stride is given.
// Strides are in elements. Many rows are divided among threads; a row's bits do not depend on how.
#pragma once

#include <cstdint>

#include "kernels/dense/dense_threads.h"
#include "kernels/dense/row_kernels.h"

namespace moebius::dense {

// residual += update and its norm, see NormWork, which describes the first row.
void add_norm(DenseThreads& threads, const NormWork& first, uint32_t num_rows);

// The norm alone of rows `stride` apart, see NormWork, which describes the first row and has no update.
void norm_rows(DenseThreads& threads, const NormWork& first, size_t stride, size_t output_stride, uint32_t num_rows);

// See GateWork, which describes the first row.
void gate(DenseThreads& threads, const GateWork& first, uint32_t num_rows);

// See SiluWork, which describes the first row; rows of values are `stride` apart.
void silu(DenseThreads& threads, const SiluWork& first, size_t stride, uint32_t num_rows);

// Rotates heads in place, see RotateWork, which describes the first row; its scratch is not read.
void rotate(DenseThreads& threads, const RotateWork& first, size_t heads_stride, uint32_t num_rows);
// The same of one row, by a worker of a call that runs already.
void rotate_row(DenseThreads& threads, const RotateWork& first, size_t heads_stride, uint32_t row, uint32_t worker);

// Rotates queries and keys in place (RotateWork describes the first row), then stores keys and values in slots.
struct RotateAppend {
  RotateWork first;       // scratch is not read
  size_t heads_stride;
  uint32_t num_rows;
  const void* values;     // [num_rows][values_stride], num_kv_heads * head_dim columns
  size_t values_stride;
  void* slots;            // [slots][2 * num_kv_heads][head_dim]
  const int64_t* slot_mapping;  // [num_rows]
  PageStorage storage;          // of the slots
};
void rotate_and_append(DenseThreads& threads, const RotateAppend& call);

// Attention of rows to positions of their requests in paged keys and values.
struct Attention {
  bool is_bfloat16;
  const void* query;      // [num_rows][query_stride], num_heads * head_dim columns
  size_t query_stride;
  const void* pages;      // [pages][page_size][2 * num_kv_heads][head_dim]
  const int32_t* block_table;  // [requests][table_stride]
  size_t table_stride;
  const int32_t* requests;     // [num_rows]
  const int32_t* begins;       // [num_rows], first position that the row sees
  const int32_t* ends;         // [num_rows], the position after the last one
  const float* sinks;          // [num_heads], logits without a value; null: none
  void* output;                // [num_rows][num_heads][head_dim]
  float scale;
  uint32_t num_rows;
  uint32_t num_heads;
  uint32_t num_kv_heads;
  uint32_t head_dim;           // a multiple of 16
  uint32_t page_size;
  PageStorage storage;         // of the pages
};
void attend(DenseThreads& threads, const Attention& call);

enum class Score : uint32_t { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2, kNone = 3 };
enum class Post : uint32_t { kNone = 0, kRenormalise = 1, kSoftmax = 2, kSigmoid = 3, kSigmoidRenormalise = 4 };

// logits = hidden_states x weight^T + bias, rounded to the weight's type, of few rows: the weight is read once for each.
struct RouterProduct {
  const void* hidden_states;  // [num_rows][hidden_size]
  bool is_bfloat16;           // hidden_states
  uint32_t num_rows;
  uint32_t hidden_size;
  const void* weight;         // [num_experts][hidden_size]
  bool weight_is_bfloat16;
  const float* bias;          // [num_experts]; null: none
  uint32_t num_experts;
  float* logits;              // [num_rows][num_experts]
};
void score_experts(DenseThreads& threads, const RouterProduct& call);

// How experts are chosen and weighed, as gpu_service/ops/router.py describes it.
struct RoutingRule {
  uint32_t num_experts;
  uint32_t top_k;
  uint32_t num_groups;
  uint32_t top_groups;
  bool group_by_maximum;     // else by the sum of its two best
  Score score;
  Post post;
  float softcap;             // 0: none
  float epsilon;
  float scale;
};

// The choice for some rows.
struct Routing : RoutingRule {
  const float* logits;       // [num_rows][num_experts]
  const float* correction;   // [num_experts], added to scores for the choice alone; null: none
  const bool* valid;         // [num_rows]; null: all are
  float* weights;            // [num_rows][top_k]
  int32_t* ids;              // [num_rows][top_k]
  uint32_t num_rows;
};
void route(DenseThreads& threads, const Routing& call);

}  // namespace moebius::dense
