// Counters of one engine. Written by its forward calls, readable at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace moebius {

struct EngineStats {
  EngineStats(uint32_t num_layers, uint32_t num_experts)
      : layer_calls(num_layers),
        layer_rows(num_layers),
        layer_experts(num_layers),
        expert_rows(static_cast<size_t>(num_layers) * num_experts) {}

  std::atomic<uint64_t> calls{0};
  std::atomic<uint64_t> rows{0};               // of all calls
  std::atomic<uint64_t> busy_nanoseconds{0};   // inside forward, waiting for another caller excluded
  std::atomic<uint64_t> nonfinite_inputs{0};   // hidden_states values that were NaN or infinite
  std::atomic<uint64_t> nonfinite_outputs{0};  // output values that were NaN or infinite
  std::vector<std::atomic<uint64_t>> layer_calls;  // [layers]
  std::vector<std::atomic<uint64_t>> layer_rows;   // [layers]
  std::vector<std::atomic<uint64_t>> layer_experts;  // [layers], experts with at least one row, summed over calls
  std::vector<std::atomic<uint64_t>> expert_rows;  // [layers, experts]
};

}  // namespace moebius
