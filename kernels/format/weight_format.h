// How the weights of one matrix are stored packed. Pure data: any file may read it, whatever instruction
// set it is built for (declarations and constants only, no inline functions; see gemm.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

// Element codes. Values are exact in the type a kernel computes in, once its scales are left aside.
enum class Code : uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat8 = 3,  // OCP e4m3fn: no infinity, 0x7f and 0xff are NaN
  kInt8 = 4,    // two's complement
  kInt4 = 5,    // 0..15, meaning code - 8, code - zero where the format has zeros, or the code itself where it has
                // mins
  kFloat4 = 6,  // OCP e2m1: sign, then 0, 0.5, 1, 1.5, 2, 3, 4, 6
  // As kInt4, with 2, 4, 16 and 32 in the place of 8; panels hold their bits in planes (panel_layout.h).
  kInt2 = 7,
  kInt3 = 8,
  kInt5 = 9,
  kInt6 = 10,
  // The places of values in a table (codebooks.h): what GGUF's IQ types are made of.
  kIq4 = 11,
  // Numbers of rows of a grid (grids.h), signs and the whole numbers of scales, as GGUF's blocks have them: words of 32 k
  // (panel_layout.h). Nothing stands for a weight alone.
  kIq3Xxs = 12,
  kIq3S = 13,  // as kIq3Xxs
  kIq2Xs = 14,  // as kIq3Xxs
  kIq1S = 15,  // as kIq3Xxs
  kIq2Xxs = 16,  // as kIq3Xxs
  kIq2S = 17,  // as kIq3Xxs
  kIq1M = 18,  // as kIq3Xxs
  // Digits -1, 0 and 1 to the base of 3: words of 32 k, too, of which each byte stands for five.
  kTq1 = 19,
};

// Type of the group scales, as packed; every one becomes a float32 exactly.
enum class ScaleType : uint8_t {
  kNone = 0,
  kFloat32 = 1,
  kBFloat16 = 2,
  kFloat16 = 3,
  kE8M0 = 4,
  kE4M3 = 5,
  // A float16 factor, which neighbouring groups share, times an int8 of each: what GGUF's blocks of 256 have, whose
  // product needs more bits than float16. panel_layout.h says how many groups share one.
  kProducts = 6,
};

// weight[column][k] = value(code[column][k]) * group_scale[column][k / group_size] * column_scale[column], plus
// minimum[column][k / group_size] where the format has mins (those have no column scale).
// A column is an output feature: a row of the checkpoint's [out, in] matrix.
struct WeightFormat {
  Code code = Code::kFloat32;
  ScaleType scale = ScaleType::kNone;
  uint32_t group_size = 0;         // of group scales, along k: 16, 32, 64 or 128; 0: no group scales
  bool panel_scale = false;        // one group scale for all columns of a panel (the 128 x 128 blocks of fp8)
  bool zeros = false;              // kInt4: a zero point 0..15 per column and group
  bool mins = false;           // kInt4, kInt8: per column and group what code 0 means, in the scales' type
  bool column_scale = false;       // a float32 per column, applied after the sum over k
  bool quantised_rows = false;     // kInt8: rows are quantised to int8 as well (W8A8)
  // Columns of the checkpoint's matrix (k) were sorted by group, and the packed expert says which one came where
  // (panel_layout.h): rows meet the panels in that order. GPTQ's act-order. GEMMs do not look at it.
  bool ordered = false;

  bool operator==(const WeightFormat&) const = default;
};

uint32_t code_bits(Code code);          // words of 32 k, of codes of grids
uint32_t scale_bytes(ScaleType scale);  // 0, 4, 2, 2, 1, 1; of products the int8: 1
bool is_grid(Code code);                // kIq3Xxs to kTq1: words of 32 k
bool is_iq1(Code code);                 // kIq1S, kIq1M: rows of signed values, an eighth more or less
// Of grids: bytes for a column's 32 k of what words have no room for, signs, of iq1 the rest of numbers, too; 0, 1 or 2.
// Of tq1 2, and 4 bits beside them.
uint32_t sign_bytes(Code code);
bool is_integer(Code code);             // kInt2 to kInt6, kInt8: those that may have mins
// What kInt2 to kInt6 have subtracted where there are neither zeros nor mins; 0 of others.
uint32_t code_middle(Code code);

const char* code_name(Code code);         // "float32" ... "tq1", as the enumerators
const char* scale_name(ScaleType scale);  // "no" for kNone, "float32" ... "products", as the enumerators

// The format of a name, for configuration, tests and benchmarks:
//   float32 bfloat16 float16
//   fp8_block        e4m3, float32 scale per 128 x 128
//   fp8_g32 fp8_g128 e4m3, float32 scale per column and group (blocks of other sizes)
//   mxfp8            e4m3, e8m0 scale per 32
//   fp8_channel      e4m3, float32 scale per column (also what a per-tensor scale becomes)
//   int8             column scale, rows as they come (W8A16)
//   int8_w8a8        column scale, rows quantised per row
//   int8_g32 int8_g64 int8_g128               group scales in bfloat16; "_f16" after it: in float16
//   int8_g16_f16     the same in groups of 16
//   int4_g32 int4_g64 int4_g128               symmetric, bfloat16 scales; "_f16" after it: float16 scales
//   int4_g32_zeros int4_g64_zeros int4_g128_zeros   with zero points; "_f16" as above
//   int4_g16_f16     symmetric, float16 scales
//   int4_g16_mins int4_g32_mins int8_g32_mins     float16 scale and minimum
//   int3_g16_products int6_g16_products                  scales that are products
//   int2_g16_mins_products int4_g32_mins_products int5_g32_mins_products   the same with mins
//   int2_g128_f16 int5_g32_f16 int5_g32_mins             float16 scales, and minima
//   iq4_g32_f16 iq4_g32_products                         values of a table
//   iq3_xxs_grid_products iq3_s_grid_products iq2_xxs_grid_products iq2_xs_grid_products iq2_s_grid_products
//   iq1_s_grid_products iq1_m_grid_products              rows of a grid
//   tq1_products                                         digits to the base of 3
//   mxfp4            e2m1, e8m0 scale per 32
//   nvfp4            e2m1, e4m3 scale per 16, column scale (the global scale)
// "_ordered" after a name of integer codes with group scales: sorted by group, see `ordered`.
// Throws std::invalid_argument listing the allowed names.
WeightFormat parse_weight_format(const std::string& name);
std::string weight_format_name(const WeightFormat& format);  // inverse of the above; "custom" when it has no name
std::vector<std::string> weight_format_names();              // without the "_ordered" ones

// The formats of gate and up: of one name both, of two with "+" between them ("iq4_g32_products+int6_g16_products")
// one each. The name of equal ones is the first form.
struct GateUpFormats {
  WeightFormat gate;
  WeightFormat up;

  bool operator==(const GateUpFormats&) const = default;
};
GateUpFormats parse_gate_up_formats(const std::string& name);
std::string gate_up_formats_name(const GateUpFormats& formats);

// Throws std::invalid_argument saying which combination is not supported (zeros without kInt4, mins without
// integer codes and float16 scales, or products, of their own, a group size that is none of those above, quantised_rows without
// kInt8, group scales without a type and the reverse).
void check_weight_format(const WeightFormat& format);

}  // namespace moebius
