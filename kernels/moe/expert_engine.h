// The experts of one server: packed weights, threads, kernels and counters behind ExpertBackend.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "kernels/isa/isa.h"
#include "kernels/moe/engine_stats.h"
#include "kernels/moe/expert_backend.h"
#include "kernels/moe/expert_store.h"
#include "kernels/moe/moe_forward.h"
#include "kernels/moe/row_groups.h"
#include "kernels/pool/thread_pool.h"

namespace moebius {

// Filled by the caller; checked by the engine's constructor.
struct EngineOptions {
  uint32_t hidden_size = 0;
  uint32_t intermediate_size = 0;  // of the local slice
  uint32_t num_experts = 0;        // held here
  uint32_t num_layers = 0;         // of the model
  uint32_t expert_begin = 0;       // global id of the first expert held here
  DType weight_dtype = DType::kFloat32;
  uint32_t num_threads = 0;        // 0: one per usable cpu
  std::vector<int> cpus;           // see ThreadPool
  int numa_node = -1;              // -1: no binding
  std::string isa = "auto";        // see resolve_isa
};

class ExpertEngine final : public ExpertBackend {
 public:
  // Throws std::invalid_argument naming the option and its value.
  explicit ExpertEngine(const EngineOptions& options);

  // Packs one expert, given by its global id. Throws std::invalid_argument when layer or expert are not
  // held here or were loaded before. Thread safe; also beside forward() of other experts.
  void load_expert(uint32_t layer, uint32_t expert, const ExpertWeights& weights);

  uint32_t hidden_size() const override { return options_.hidden_size; }
  // One call at a time: a second caller waits. Throws std::invalid_argument when the layer is out of range
  // or a chosen expert is not loaded.
  void forward(const ExpertRequest& request, float* output) override;

  const EngineOptions& options() const { return options_; }
  Isa isa() const { return isa_; }
  uint32_t num_threads() const { return pool_.size(); }
  size_t packed_bytes() const { return store_.packed_bytes(); }
  bool numa_bound() const { return store_.numa_bound(); }
  const EngineStats& stats() const { return stats_; }

 private:
  void check_layer(uint32_t layer) const;
  void check_request(const ExpertRequest& request, const float* output) const;
  void check_loaded(uint32_t layer) const;
  void count(const ExpertRequest& request, uint64_t nonfinite);

  EngineOptions options_;
  Isa isa_;
  const KernelTable& kernels_;
  ExpertStore store_;
  ThreadPool pool_;
  std::mutex forward_mutex_;
  RowGroups groups_;   // under forward_mutex_
  MoeForward moe_;     // under forward_mutex_
  EngineStats stats_;
};

}  // namespace moebius
