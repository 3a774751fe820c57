#include "tests/kernels/fuzz/fuzz_golden.h"

#include <algorithm>
#include <cmath>

#include "kernels/format/pack.h"

namespace moebius::fuzz {
namespace {

constexpr double kSum = 1e-5;
constexpr double kBFloat16 = 1.0 / 256;
constexpr double kSplitStep = 1.0 / (1 << 15);  // of rows that become 16-bit integers (dot_split.inc.h)
constexpr double kInt8Step = 1.01 / 254;  // a little more: the maximum itself carries an error
constexpr double kSiluSlope = 1.1;

// A number and how far off it may be.
struct Value {
  double value = 0.0;
  double error = 0.0;
};

struct Unpacked {
  std::vector<float> weights;
  std::vector<float> bias;
};

// Panels `first`, `first + step`, ... as a matrix [rows, k].
Unpacked unpack_matrix(const PanelLayout& layout, const std::byte* panels, size_t step, uint32_t rows) {
  const uint32_t count = (rows + kPanelColumns - 1) / kPanelColumns;
  Unpacked result;
  result.weights.resize(size_t{count} * kPanelColumns * layout.k);
  result.bias.resize(size_t{count} * kPanelColumns);
  for (uint32_t i = 0; i < count; ++i) {
    unpack_panel(layout, panels + i * step,
                 result.weights.data() + size_t{i} * kPanelColumns * layout.k, result.bias.data() + i * kPanelColumns);
  }
  return result;
}

// Row times weights plus bias.
Value product(const std::vector<Value>& row, const float* weights, float bias) {
  double sum = bias;
  double magnitude = std::abs(bias);
  double error = 0.0;
  for (size_t k = 0; k < row.size(); ++k) {
    sum += row[k].value * weights[k];
    magnitude += std::abs(row[k].value * weights[k]);
    error += row[k].error * std::abs(weights[k]);
  }
  return {sum, error + kSum * (magnitude + error)};
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// A product of two uncertain factors, the second term of the error included.
Value times(double a, double a_error, double b, double b_error) {
  const double value = a * b;
  return {value, a_error * std::abs(b) + std::abs(a) * b_error + a_error * b_error + kSum * std::abs(value)};
}

Value activate(const EngineOptions& options, const Value& gate, const Value& up) {
  const double limit = options.limits[0];
  const double clamped_gate = gate.value > limit ? limit : gate.value;
  const double clamped_up = up.value > limit ? limit : up.value < -limit ? -limit : up.value;
  switch (options.activation) {
    case Activation::kSilu:
      return times(gate.value * sigmoid(gate.value), kSiluSlope * gate.error, up.value, up.error);
    case Activation::kSiluClamped:
      return times(std::min(gate.value * sigmoid(gate.value), limit), kSiluSlope * gate.error, clamped_up, up.error);
    case Activation::kGptOss:
      return times(clamped_gate * sigmoid(options.alpha * clamped_gate), kSiluSlope * gate.error, clamped_up + 1.0,
                   up.error);
    case Activation::kClampedSilu:
      return times(clamped_gate * sigmoid(clamped_gate), kSiluSlope * gate.error, clamped_up, up.error);
    case Activation::kRelu2: {
      const double positive = up.value < 0.0 ? 0.0 : up.value;
      return times(positive, up.error, positive, up.error);
    }
    case Activation::kGeluTanh: {
      // Its slope is at most 1.13, silu's 1.10.
      const double x = gate.value;
      const double gelu = x * sigmoid(x * (1.5957691216057308 + 0.0713548162726 * x * x));
      return times(gelu, 1.13 * gate.error, up.value, up.error);
    }
  }
  return {};
}

// Adds what quantising or rounding a row costs.
void round_row(std::vector<Value>& row, const WeightFormat& format, bool to_bfloat16) {
  double largest = 0.0;
  for (const Value& value : row) largest = std::max(largest, std::abs(value.value) + value.error);
  for (Value& value : row) {
    if (to_bfloat16) value.error += kBFloat16 * (std::abs(value.value) + value.error);
    if (format.quantised_rows) value.error += kInt8Step * largest;
  }
}

// What a row in bfloat16 may lose to its largest value.
void split_row(std::vector<Value>& row) {
  double largest = 0.0;
  for (const Value& value : row) largest = std::max(largest, std::abs(value.value));
  for (Value& value : row) value.error += kSplitStep * largest;
}

std::vector<Value> expert_activation(const FuzzCase& fuzz, const std::vector<Value>& row,
                                     const UnpackedExpert& expert) {
  const EngineOptions& options = fuzz.options;
  std::vector<Value> activation(options.intermediate_size);
  for (uint32_t i = 0; i < options.intermediate_size; ++i) {
    const size_t begin = size_t{i} * options.hidden_size;
    const Value up = product(row, expert.up.data() + begin, expert.up_bias[i]);
    const Value gate = options.is_gated() ? product(row, expert.gate.data() + begin, expert.gate_bias[i]) : Value{};
    activation[i] = activate(options, gate, up);
  }
  round_row(activation, options.formats[0].down, fuzz.dtype == DType::kBFloat16);
  return activation;
}

}  // namespace

UnpackedExpert unpack_expert(const ExpertLayout& layout, const std::byte* packed) {
  UnpackedExpert expert;
  if (layout.gated) {
    Unpacked gate = unpack_matrix(layout.gate, packed, layout.gate_step, layout.intermediate_size);
    expert.gate = std::move(gate.weights);
    expert.gate_bias = std::move(gate.bias);
  }
  Unpacked up = unpack_matrix(layout.gate_up, packed + layout.up_offset, layout.up_step, layout.intermediate_size);
  expert.up = std::move(up.weights);
  expert.up_bias = std::move(up.bias);
  Unpacked down = unpack_matrix(layout.down, packed + layout.down_offset, layout.down.panel_bytes, layout.hidden_size);
  expert.down = std::move(down.weights);
  expert.down_bias = std::move(down.bias);
  return expert;
}

Golden compute_golden(const FuzzCase& fuzz, const FuzzRequest& request, const std::vector<UnpackedExpert>& experts) {
  const EngineOptions& options = fuzz.options;
  const uint32_t hidden = options.hidden_size;
  Golden golden;
  golden.output.resize(size_t{fuzz.rows} * hidden);
  golden.bound.resize(size_t{fuzz.rows} * hidden);
  for (uint32_t pair = 0; pair < fuzz.rows * fuzz.top_k; ++pair) {
    const int64_t index = int64_t{request.ids[pair]} - options.expert_begin;
    if (index < 0 || index >= options.num_experts) continue;
    const size_t begin = size_t{pair / fuzz.top_k} * hidden;
    std::vector<Value> row(hidden);
    for (uint32_t k = 0; k < hidden; ++k) row[k].value = request.rows[begin + k];
    round_row(row, options.formats[0].gate_up.up, false);
    if (fuzz.dtype == DType::kBFloat16) split_row(row);
    const UnpackedExpert& expert = experts[static_cast<size_t>(index)];
    const std::vector<Value> activation = expert_activation(fuzz, row, expert);
    for (uint32_t column = 0; column < hidden; ++column) {
      const size_t weights = size_t{column} * options.intermediate_size;
      const Value result = product(activation, expert.down.data() + weights, expert.down_bias[column]);
      golden.output[begin + column] += request.weights[pair] * result.value;
      golden.bound[begin + column] +=
          std::abs(request.weights[pair]) * (result.error + kSum * std::abs(result.value));
    }
  }
  return golden;
}

}  // namespace moebius::fuzz
