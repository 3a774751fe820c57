// The GEMMs at the heart of an expert, and what goes around them, for one instruction set each.
//
// Phase A multiplies rows of hidden_states by gate/up panels and applies the activation; phase B multiplies the
// activation by down panels and adds the weighted result to the output. Both use the same GEMM
//     result[row][column] = column_scale * sum over groups of (group_scale * sum over k of row[k] * value[k][column]
//                                                              + minimum * sum over k of row[k])
//                           (+ bias[column])
// GEMM kernels differ in the type they want rows in and in the formats they know. Which one computes an expert is
// chosen by its number of rows, from times measured at load (kernel_plan.h).
//
// This header is read by files built for one instruction set: declarations only, no inline functions, or the
// linker could keep an AVX-512 copy of a function that every machine calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/panel_layout.h"

namespace moebius {

enum class Isa : int;  // kernels/isa/isa.h

// The type in which a GEMM reads rows. float32: any request, exact. bfloat16: requests in bfloat16, products exact in
// float32, sums in float32; the activation between the two phases is rounded to bfloat16. int8: W8A8 formats
// only; each row carries its scale.
enum class RowType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

struct GemmWork {
  const PanelLayout* layout;
  const std::byte* panels;    // num_panels panels, contiguous
  uint32_t num_panels;
  const void* const* rows;    // [num_rows] pointers to [layout->k_padded] elements, 64-byte aligned, zero padded;
                              // or to what the kernel's prepare_row made of them
  size_t row_stride;          // bytes between rows when they are equally spaced; 0 when they are not
  const float* row_scales;    // [num_rows], kInt8 only
  uint32_t num_rows;          // > 0
  float* result;              // [num_rows][result_stride], 16 * num_panels columns written, 64-byte aligned
  size_t result_stride;       // floats, a multiple of 16
  std::byte* scratch;         // this thread's, 64-byte aligned, at least scratch_bytes(...)
  const std::byte* next = nullptr;  // panels that this thread reads after these, to be prefetched; null: not known
  bool was_next = false;      // `panels` were `next` of this thread's work before: they need not be asked for
};

struct GemmKernel {
  const char* name;           // "<isa>_<what>", for plans, logs and tests
  Isa isa;                    // the level it needs
  RowType row_type;
  uint32_t spaced_rows;       // 2 to this many rows had better be equally spaced: others are copied in every call
  uint32_t max_rows;          // more rows than this are never useful here; 0: no limit
  bool (*supports)(const WeightFormat& format);
  size_t (*scratch_bytes)(const PanelLayout& layout, uint32_t num_panels, uint32_t num_rows);
  void (*run)(const GemmWork& work);
  // Prepares a row before it is multiplied; null: nothing. The result depends on the layout and the row alone,
  // so that one serves every work with that row. `prepared` is 64-byte aligned.
  size_t (*prepared_row_bytes)(const PanelLayout& layout) = nullptr;
  void (*prepare_row)(const PanelLayout& layout, const void* row, std::byte* prepared) = nullptr;
};

// Activations of an expert. gate and up are results of phase A (bias included):
//   kSilu         silu(gate) * up
//   kSiluClamped  min(silu(gate), limit) * clamp(up, -limit, limit); an infinite limit is kSilu    (step3p5)
//   kGptOss       g = min(gate, limit); (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)
//   kRelu2        max(up, 0)^2, no gate
//   kGeluTanh     gelu(gate) * up, by the tanh form of GELU: 0.5 g (1 + tanh(u)) = g * sigmoid(2 u),
//                 u = sqrt(2 / pi) (g + 0.044715 g^3)    (gemma4)
//   kClampedSilu  silu(min(gate, limit)) * clamp(up, -limit, limit)                                (glm5_next)
// NaN passes through every one of them.
enum class Activation : uint8_t {
  kSilu = 0,
  kSiluClamped = 1,
  kGptOss = 2,
  kRelu2 = 3,
  kGeluTanh = 4,
  kClampedSilu = 5,
};

// 2 sqrt(2 / pi) of g and of g^3 in the sigmoid of kGeluTanh.
constexpr float kGeluLinear = 1.5957691216057308f;
constexpr float kGeluCubic = 0.0713548162726f;

struct ActivationWork {
  Activation activation;
  float alpha;
  float limit;
  const float* result;        // [num_rows][result_stride]: per block 16 gate then 16 up (kRelu2: 16 up); all gate, then
                              // all up, where `apart`
  size_t result_stride;       // floats
  uint32_t num_rows;
  uint32_t num_blocks;        // of 16 intermediate columns
  void* output;               // [num_rows][output_stride] float32 or bfloat16, 16 * num_blocks columns written
  size_t output_stride;       // elements
  bool apart = false;
};

// output[row_ids[i]][column] += weights[i] * result[i][column], for column < num_columns.
struct ScatterWork {
  const float* result;        // [num_rows][result_stride]
  size_t result_stride;
  const uint32_t* row_ids;    // [num_rows]
  const float* weights;       // [num_rows]
  uint32_t num_rows;
  uint32_t num_columns;
  float* output;              // first column of row 0
  size_t output_stride;
};

// Everything but the GEMMs, for one instruction set. Elements are converted one to one; `count` in elements.
struct VectorKernels {
  Isa isa;
  void (*activate_float32)(const ActivationWork& work);
  void (*activate_bfloat16)(const ActivationWork& work);  // rounds to nearest even
  void (*scatter)(const ScatterWork& work);
  void (*bfloat16_to_float32)(const uint16_t* source, float* target, size_t count);
  void (*float16_to_float32)(const uint16_t* source, float* target, size_t count);
  void (*float32_to_bfloat16)(const float* source, uint16_t* target, size_t count);
  // target[i] = round to nearest even(source[i] / scale), scale = max |source| / 127 (1 for a zero row); returns
  // scale. A row with a NaN or infinity gets a NaN scale, so that its results are NaN.
  float (*quantise_row)(const float* source, int8_t* target, size_t count);
  uint64_t (*count_nonfinite)(const float* source, size_t count);
};

// --- the tables, one accessor per instruction set; callers check supported_isas() first -----------------

struct GemmKernels {
  const GemmKernel* const* kernels;  // [count]
  size_t count;
};

GemmKernels gemms_scalar();        // kernels/gemm/gemm_scalar.cc: every format, float32 and int8 rows
GemmKernels gemms_avx2();          // kernels/gemm/gemm_avx2.cc: every format, float32 and int8 rows
GemmKernels gemms_avx512();        // kernels/gemm/gemm_avx512.cc: every format, float32 and int8 rows
GemmKernels gemms_avx512_vnni();   // .../gemm_avx512_vnni.cc: int8 rows, bfloat16 rows by 4-bit codes
GemmKernels gemms_avx512_bf16();   // kernels/gemm/gemm_avx512_bf16.cc: bfloat16 rows
GemmKernels gemms_amx();           // kernels/gemm/gemm_amx.cc: bfloat16 rows (all formats), int8 rows

const VectorKernels& vector_kernels_scalar();
const VectorKernels& vector_kernels_avx2();
const VectorKernels& vector_kernels_avx512();

}  // namespace moebius
