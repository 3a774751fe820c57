#include "kernels/moe/expert_engine.h"

#include <chrono>
#include <stdexcept>

namespace moebius {
namespace {

EngineOptions checked(const EngineOptions& options) {
  auto positive = [](uint32_t value, const char* name) {
    if (value == 0) throw std::invalid_argument(std::string(name) + " is 0; it must be at least 1");
  };
  positive(options.hidden_size, "hidden_size");
  positive(options.intermediate_size, "intermediate_size");
  positive(options.num_experts, "num_experts");
  positive(options.num_layers, "num_layers");
  if (options.weight_dtype != DType::kFloat32 && options.weight_dtype != DType::kBFloat16) {
    throw std::invalid_argument("weight_dtype: only float32 and bfloat16 are packed");
  }
  return options;
}

}  // namespace

ExpertEngine::ExpertEngine(const EngineOptions& options)
    : options_(checked(options)),
      isa_(resolve_isa(options.isa)),
      kernels_(kernel_table(isa_)),
      store_(PackedShape(options.hidden_size, options.intermediate_size, kernels_.lanes, options.weight_dtype),
             options.num_layers, options.num_experts, options.numa_node),
      pool_(options.num_threads, options.cpus),
      moe_(kernels_, store_, pool_),
      stats_(options.num_layers, options.num_experts) {}

void ExpertEngine::load_expert(uint32_t layer, uint32_t expert, const ExpertWeights& weights) {
  check_layer(layer);
  const uint32_t end = options_.expert_begin + options_.num_experts;
  if (expert < options_.expert_begin || expert >= end) {
    throw std::invalid_argument("expert " + std::to_string(expert) + " is not held here; allowed: " +
                                std::to_string(options_.expert_begin) + " to " + std::to_string(end - 1));
  }
  store_.load(layer, expert - options_.expert_begin, weights);
}

void ExpertEngine::forward(const ExpertRequest& request, float* output) {
  check_request(request, output);
  std::lock_guard<std::mutex> lock(forward_mutex_);
  const auto start = std::chrono::steady_clock::now();
  groups_.group(request.topk_ids, request.topk_weights, request.rows, request.top_k, options_.expert_begin,
                options_.num_experts);
  check_loaded(request.layer);
  const uint64_t nonfinite = request.rows == 0 ? 0 : moe_.run(request, groups_, output);
  count(request, nonfinite);
  const auto busy = std::chrono::steady_clock::now() - start;
  stats_.busy_nanoseconds += static_cast<uint64_t>(std::chrono::nanoseconds(busy).count());
}

void ExpertEngine::check_layer(uint32_t layer) const {
  if (layer < options_.num_layers) return;
  throw std::invalid_argument("layer " + std::to_string(layer) + " does not exist; allowed: 0 to " +
                              std::to_string(options_.num_layers - 1));
}

void ExpertEngine::check_request(const ExpertRequest& request, const float* output) const {
  check_layer(request.layer);
  if (request.dtype != DType::kFloat32 && request.dtype != DType::kBFloat16) {
    throw std::invalid_argument("hidden_states: dtype " + std::to_string(static_cast<uint32_t>(request.dtype)) +
                                " is unknown; allowed: 1 (float32), 2 (bfloat16)");
  }
  if (request.rows > 0 && request.top_k == 0) throw std::invalid_argument("top_k is 0; it must be at least 1");
  const bool complete = request.hidden_states && request.topk_ids && request.topk_weights && output;
  if (request.rows > 0 && !complete) throw std::invalid_argument("forward: a buffer of the request is null");
}

void ExpertEngine::check_loaded(uint32_t layer) const {
  for (const RowGroups::Group& group : groups_.groups) {
    if (store_.find(layer, group.expert) != nullptr) continue;
    throw std::invalid_argument("layer " + std::to_string(layer) + ": expert " +
                                std::to_string(options_.expert_begin + group.expert) + " is not loaded");
  }
}

void ExpertEngine::count(const ExpertRequest& request, uint64_t nonfinite) {
  ++stats_.calls;
  stats_.rows += request.rows;
  stats_.nonfinite_outputs += nonfinite;
  ++stats_.layer_calls[request.layer];
  stats_.layer_rows[request.layer] += request.rows;
  const size_t first = static_cast<size_t>(request.layer) * options_.num_experts;
  for (const RowGroups::Group& group : groups_.groups) stats_.expert_rows[first + group.expert] += group.rows;
}

}  // namespace moebius
