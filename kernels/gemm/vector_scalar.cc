// Activations, scatter and conversions as a reference.
#include <cmath>

#include "kernels/format/numbers.h"
#include "kernels/gemm/gemm.h"
#include "kernels/isa/isa.h"

namespace moebius {
namespace {

constexpr uint32_t kColumns = kPanelColumns;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// A NaN is neither below nor above a limit, so it passes.
float at_most(float x, float limit) { return x > limit ? limit : x; }
float at_least(float x, float limit) { return x < limit ? limit : x; }
float clamp(float x, float limit) { return at_least(at_most(x, limit), -limit); }

float activate(const ActivationWork& work, float gate, float up) {
  switch (work.activation) {
    case Activation::kSilu: return gate * sigmoid(gate) * up;
    case Activation::kSiluClamped: return at_most(gate * sigmoid(gate), work.limit) * clamp(up, work.limit);
    case Activation::kGptOss: {
      const float g = at_most(gate, work.limit);
      return (clamp(up, work.limit) + 1.0f) * g * sigmoid(work.alpha * g);
    }
    case Activation::kRelu2: {
      const float x = at_least(up, 0.0f);
      return x * x;
    }
    case Activation::kGeluTanh: return gate * sigmoid(gate * (kGeluLinear + kGeluCubic * gate * gate)) * up;
    case Activation::kClampedSilu: {
      const float g = at_most(gate, work.limit);
      return g * sigmoid(g) * clamp(up, work.limit);
    }
  }
  return 0.0f;
}

template <class Store>
void activate_all(const ActivationWork& work, const Store& store) {
  const bool gated = work.activation != Activation::kRelu2;
  const bool apart = gated && work.apart;
  const size_t block_columns = gated && !apart ? 2 * kColumns : kColumns;
  const size_t to_up = !gated ? 0 : apart ? size_t{work.num_blocks} * kColumns : kColumns;
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    for (uint32_t block = 0; block < work.num_blocks; ++block) {
      const float* gate = work.result + row * work.result_stride + block * block_columns;
      const float* up = gate + to_up;
      const size_t target = row * work.output_stride + size_t{block} * kColumns;
      for (uint32_t i = 0; i < kColumns; ++i) store(target + i, activate(work, gate[i], up[i]));
    }
  }
}

void activate_float32(const ActivationWork& work) {
  float* const output = static_cast<float*>(work.output);
  activate_all(work, [output](size_t index, float value) { output[index] = value; });
}

void activate_bfloat16(const ActivationWork& work) {
  uint16_t* const output = static_cast<uint16_t*>(work.output);
  activate_all(work, [output](size_t index, float value) { output[index] = encode_bfloat16(value); });
}

void scatter(const ScatterWork& work) {
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    const float* result = work.result + row * work.result_stride;
    float* output = work.output + work.row_ids[row] * work.output_stride;
    for (uint32_t i = 0; i < work.num_columns; ++i) output[i] += work.weights[row] * result[i];
  }
}

void bfloat16_to_float32(const uint16_t* source, float* target, size_t count) {
  for (size_t i = 0; i < count; ++i) target[i] = decode_bfloat16(source[i]);
}

void float16_to_float32(const uint16_t* source, float* target, size_t count) {
  for (size_t i = 0; i < count; ++i) target[i] = decode_float16(source[i]);
}

void float32_to_bfloat16(const float* source, uint16_t* target, size_t count) {
  for (size_t i = 0; i < count; ++i) target[i] = encode_bfloat16(source[i]);
}

// A largest magnitude below this counts as zero: its scale would be subnormal and too coarse to divide by.
constexpr float kSmallestMagnitude = 127 * 0x1p-126f;

float quantise_row(const float* source, int8_t* target, size_t count) {
  float largest = 0.0f;
  bool finite = true;
  for (size_t i = 0; i < count; ++i) {
    finite = finite && std::isfinite(source[i]);
    largest = std::fmax(largest, std::fabs(source[i]));
  }
  if (!finite || largest < kSmallestMagnitude) {
    for (size_t i = 0; i < count; ++i) target[i] = 0;
    return finite ? 1.0f : std::nanf("");
  }
  const float scale = largest / 127.0f;
  for (size_t i = 0; i < count; ++i) target[i] = static_cast<int8_t>(std::lrintf(source[i] / scale));
  return scale;
}

uint64_t count_nonfinite(const float* source, size_t count) {
  uint64_t found = 0;
  for (size_t i = 0; i < count; ++i) found += std::isfinite(source[i]) ? 0 : 1;
  return found;
}

constexpr VectorKernels kKernels{Isa::kScalar,       activate_float32,   activate_bfloat16,
                                 scatter,            bfloat16_to_float32, float16_to_float32,
                                 float32_to_bfloat16, quantise_row,       count_nonfinite};

}  // namespace

const VectorKernels& vector_kernels_scalar() { return kKernels; }

}  // namespace moebius
