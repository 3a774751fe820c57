// The inner kernels of one instruction set. Both phases are the same product
//     acc[row][column] = sum over k, ascending, of a[row][k] * weight[k][column]
// over panels of 2 * lanes columns; they differ in what they do with acc. Each element is one chain of fused
// multiply-adds in the order of k, whatever the number of rows or panels computed together, so a row's
// result never depends on its neighbours.
//
// This header is read by files built for one instruction set: declarations only, no inline functions.
//
// Panel of K x 2*lanes weights ("low" and "high" half of the columns):
//   float32   [k][low lanes | high lanes] float
//   bfloat16  [k][lanes] uint32: low column's bits in the lower half, high column's in the upper half;
//             one load, one shift and one mask give both halves as float32
#pragma once

#include <cstddef>
#include <cstdint>

namespace moebius {

enum class Isa : int;  // kernels/isa/isa.h

// Phase A: activation[i][p * lanes + lane] = silu(low) * high; low columns are gate, high columns up.
struct GateUpWork {
  const void* panels;  // num_panels panels, contiguous
  uint32_t num_panels;
  uint32_t k;  // hidden_size
  const float* const* rows;   // num_rows pointers to [k]
  uint32_t num_rows;
  float* activation;          // [num_rows, activation_stride], columns of the first panel first
  size_t activation_stride;   // floats
};

// Phase B: output[row_ids[i]][column] += weights[i] * acc, for columns below num_columns.
struct DownWork {
  const void* panels;         // num_panels panels, contiguous
  uint32_t num_panels;
  uint32_t k;                 // intermediate_size
  const float* activation;    // [num_rows, activation_stride]
  size_t activation_stride;   // floats
  const uint32_t* row_ids;    // [num_rows]
  const float* weights;       // [num_rows], router weights
  uint32_t num_rows;
  float* output;              // first column of the first panel of row 0
  size_t output_stride;       // floats
  uint32_t num_columns;       // columns that exist; the rest of the last panel is padding
};

struct KernelTable {
  uint32_t lanes;  // columns per panel half
  void (*gate_up_float32)(const GateUpWork&);
  void (*gate_up_bfloat16)(const GateUpWork&);
  void (*down_float32)(const DownWork&);
  void (*down_bfloat16)(const DownWork&);
};

const KernelTable& kernel_table_scalar();  // kernels/moe/moe_scalar.cc
const KernelTable& kernel_table_avx2();    // kernels/moe/moe_avx2.cc
const KernelTable& kernel_table_avx512();  // kernels/moe/moe_avx512.cc

const KernelTable& kernel_table(Isa isa);  // the one of a level that supported_isas() lists

}  // namespace moebius
