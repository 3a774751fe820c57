// The loops of requantising, for one instruction set each. Read by files built for one instruction set:
// declarations only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/weight_format.h"

namespace moebius {

// A panel on its way to another format. Every array has 16 columns side by side.
struct RequantiseWork {
  const float* weights;    // [k_padded][16], zero from k on
  uint32_t k;
  uint32_t k_padded;       // a multiple of 64
  uint32_t group_size;     // int4: of scales, along k
  ScaleType scale_type;    // int4: float32, bfloat16 or float16
  std::byte* codes;        // the panel's lines (panel_layout.h)
  float* scales;           // int4: [groups][16]; int8: [16]; already rounded to scale_type
  uint8_t* zeros;          // [groups][16]; null: symmetric
  double* squared_error;   // [16], added to
};

struct RequantiseKernels {
  void (*to_bfloat16)(const RequantiseWork& work);
  void (*to_float16)(const RequantiseWork& work);
  void (*to_int8)(const RequantiseWork& work);
  void (*to_int4)(const RequantiseWork& work);
  void (*to_int4_zeros)(const RequantiseWork& work);
  // squared[column] += weight^2, in float64
  void (*sum_squares)(const float* weights, uint32_t k, double* squared);
};

const RequantiseKernels& requantise_scalar();  // kernels/format/requantise_scalar.cc
const RequantiseKernels& requantise_avx2();    // kernels/format/requantise_avx2.cc
const RequantiseKernels& requantise_avx512();  // kernels/format/requantise_avx512.cc

}  // namespace moebius
