// Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.2) of rows that are computed alone.
//
// Of a token pages hold its latent, from which keys and values of all heads follow, and a rotated part of its keys that
// all heads share. Queries are carried into the space of latents by each head's projection of keys ("absorbed"), where
// a latent is both key and value; what they attend to is carried back by the projection of values.
//
// Floating-point memory is float32, or bfloat16 where the call says so. Strides are in elements. A row's bits depend on
// no other row, nor on the threads.
#pragma once

#include <cstdint>

#include "kernels/dense/dense_threads.h"
#include "kernels/dense/row_kernels.h"

namespace moebius::dense {

// Rows of every head times a matrix of the head's own.
struct HeadProducts {
  bool is_bfloat16;
  const void* rows;  // [num_rows][row_stride], heads head_stride apart
  size_t row_stride;
  size_t head_stride;
  const void* matrices;  // heads matrix_stride apart: [matrix_rows][latent_dim]
  size_t matrix_stride;
  void* output;  // absorb_queries: [num_rows][num_heads][latent_dim]; project_values: [...][matrix_rows]
  uint32_t num_rows;
  uint32_t num_heads;
  uint32_t matrix_rows;
  uint32_t latent_dim;  // a multiple of 16
};
// output = row x matrix: matrix_rows elements of a head's row are read.
void absorb_queries(DenseThreads& threads, const HeadProducts& call);
// output = row x matrix^T: latent_dim elements of a head's row are read.
void project_values(DenseThreads& threads, const HeadProducts& call);

// Attention of absorbed queries to the first positions of their requests.
struct LatentAttention {
  bool is_bfloat16;
  const void* query;  // [num_rows][num_heads][latent_dim]
  const void* query_rope;  // [num_rows][rope_row_stride], heads rope_head_stride apart, rope_dim elements of each
  size_t rope_row_stride;
  size_t rope_head_stride;
  const void* pages;  // [pages][page_size][latent_dim + rope_dim]
  const int32_t* block_table;  // [requests][table_stride]
  size_t table_stride;
  const int32_t* requests;  // [num_rows]
  const int32_t* ends;  // [num_rows], the position after the last one that the row sees; at least 1
  const float* sinks;  // [num_heads], logits without a value; null: none
  void* output;  // [num_rows][num_heads][latent_dim]
  float scale;
  uint32_t num_rows;
  uint32_t num_heads;
  uint32_t latent_dim;  // a multiple of 16
  uint32_t rope_dim;  // likewise
  uint32_t page_size;
  PageStorage storage;  // of the pages
};
void attend_latents(DenseThreads& threads, const LatentAttention& call);

// Stores latents, normed, and parts of keys, rotated, of the tokens of a step.
struct AppendLatents {
  NormWork norm;  // of the first row's latent; its update, output and size are not read
  RotateWork rotation;  // of the first row's part of a key, one head, rotated in place; null cosines: as it is
  size_t row_stride;  // of both
  uint32_t num_rows;
  uint32_t latent_dim;
  uint32_t rope_dim;
  void* slots;  // [slots][latent_dim + rope_dim]
  const int64_t* slot_mapping;  // [num_rows]
  PageStorage storage;  // of the slots
};
void append_latents(DenseThreads& threads, const AppendLatents& call);

}  // namespace moebius::dense
