#include "kernels/moe/engine_options.h"

#include <cmath>
#include <stdexcept>

namespace moebius {
namespace {

void check_positive(uint32_t value, const char* name) {
  if (value == 0) throw std::invalid_argument(std::string(name) + " is 0; it must be at least 1");
}

void check_limit(const EngineOptions& options) {
  const bool clamped = options.activation != Activation::kSilu && options.activation != Activation::kRelu2;
  for (const float limit : options.limits) {
    if (!clamped || limit > 0) continue;
    throw std::invalid_argument("limit is " + std::to_string(limit) + "; it must be above 0");
  }
  if (options.activation == Activation::kGptOss && !std::isfinite(options.alpha)) {
    throw std::invalid_argument("alpha is " + std::to_string(options.alpha) + "; it must be finite");
  }
}

}  // namespace

Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "silu_clamped") return Activation::kSiluClamped;
  if (name == "gpt_oss") return Activation::kGptOss;
  if (name == "relu2") return Activation::kRelu2;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "clamped_silu") return Activation::kClampedSilu;
  throw std::invalid_argument("activation='" + name +
                              "' is unknown; allowed: silu, silu_clamped, gpt_oss, relu2, gelu_tanh, "
                              "clamped_silu");
}

EngineOptions checked_options(EngineOptions options) {
  check_positive(options.hidden_size, "hidden_size");
  check_positive(options.intermediate_size, "intermediate_size");
  check_positive(options.num_experts, "num_experts");
  check_positive(options.num_layers, "num_layers");
  check_limit(options);
  if (options.formats.size() != 1 && options.formats.size() != options.num_layers) {
    throw std::invalid_argument("weight_format names " + std::to_string(options.formats.size()) +
                                " formats; it must be one, or one per layer (" + std::to_string(options.num_layers) +
                                ")");
  }
  if (options.limits.size() != 1 && options.limits.size() != options.num_layers) {
    throw std::invalid_argument("limit has " + std::to_string(options.limits.size()) +
                                " numbers; it must be one, or one per layer (" + std::to_string(options.num_layers) +
                                ")");
  }
  options.formats.resize(options.num_layers, options.formats.front());
  options.limits.resize(options.num_layers, options.limits.front());
  return options;
}

}  // namespace moebius
