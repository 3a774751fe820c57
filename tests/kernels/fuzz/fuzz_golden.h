// What a request has to give, in double precision and one element after the other, with a bound of the error.
#pragma once

#include <vector>

#include "kernels/format/panel_layout.h"
#include "tests/kernels/fuzz/fuzz_case.h"

namespace moebius::fuzz {

// One expert's weights in float32, by the reference unpacker. Biases are zero where there are none.
struct UnpackedExpert {
  std::vector<float> gate, up, down;  // [intermediate, hidden] twice, [hidden, intermediate]; gate may be empty
  std::vector<float> gate_bias, up_bias, down_bias;
};
UnpackedExpert unpack_expert(const ExpertLayout& layout, const std::byte* packed);

struct Golden {
  std::vector<double> output;  // [rows, hidden]
  std::vector<double> bound;   // [rows, hidden] how far a correct result may lie from it
};

// experts[i] is the expert of id expert_begin + i. The bound follows the rules of gemm.h:
//   sums in float32: 1e-5 of the sum of absolute products; element errors below come on top
//   bfloat16 requests: the activation may be rounded to bfloat16 (2^-8 of it: both halves of an interval)
//   W8A8: an element of a row is off by half a step, max |row| / 254
// An error of gate and up passes the activation times its slope, which is at most 1.1 for silu.
Golden compute_golden(const FuzzCase& fuzz, const FuzzRequest& request, const std::vector<UnpackedExpert>& experts);

}  // namespace moebius::fuzz
