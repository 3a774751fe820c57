// The options of an engine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/format/panel_layout.h"
#include "kernels/gemm/gemm.h"
#include "kernels/moe/weight_segment.h"

namespace moebius {

// Packed formats of one layer's matrices; quantisers often keep some layers, or the down matrices, wider.
struct LayerFormats {
  GateUpFormats gate_up;
  WeightFormat down;

  bool operator==(const LayerFormats&) const = default;
};

// Filled by the caller; checked by the engine's constructor.
struct EngineOptions {
  uint32_t hidden_size = 0;
  uint32_t intermediate_size = 0;      // of the local slice
  uint32_t num_experts = 0;            // held here
  uint32_t num_layers = 0;             // of the model
  uint32_t expert_begin = 0;           // global id of the first expert held here
  std::vector<LayerFormats> formats;   // one for all layers, or one per layer
  Activation activation = Activation::kSilu;
  float alpha = 1.702f;                // kGptOss
  std::vector<float> limits = {7.0f};  // all that clamp: one for all layers, or one per layer
  bool has_bias = false;               // gate, up and down have one
  uint32_t num_threads = 0;            // 0: one per usable cpu
  std::vector<int> cpus;               // see ThreadPool
  int numa_node = -1;                  // -1: no binding
  std::string isa = "auto";            // see resolve_isa
  const GemmKernel* kernel = nullptr;  // to use wherever it can; null: by the plan
  weights::SegmentOptions segment;     // where packed experts lie; without a path: in memory of this process alone

  bool is_gated() const { return activation != Activation::kRelu2; }
};

// The name of an activation: "silu", "silu_clamped", "gpt_oss", "relu2", "gelu_tanh", "clamped_silu". Throws
// std::invalid_argument listing them.
Activation parse_activation(const std::string& name);

// Returns options with one entry of formats and limits per layer. Throws std::invalid_argument naming the option and
// its value.
EngineOptions checked_options(EngineOptions options);

}  // namespace moebius
