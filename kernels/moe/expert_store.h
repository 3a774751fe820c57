// Packed experts of all layers. A layer's memory is mapped when its first expert is loaded.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/moe/arena.h"
#include "kernels/moe/packing.h"

namespace moebius {

class ExpertStore {
 public:
  ExpertStore(const PackedShape& shape, uint32_t num_layers, uint32_t num_experts, int numa_node);

  // Packs one expert (local index). Different experts may be loaded from several threads at once. Throws
  // std::invalid_argument when it was loaded before.
  void load(uint32_t layer, uint32_t expert, const ExpertWeights& weights);

  // The packed expert, or null while it is not loaded.
  const std::byte* find(uint32_t layer, uint32_t expert) const;

  const PackedShape& shape() const { return shape_; }
  size_t packed_bytes() const;  // mapped for layers so far
  bool numa_bound() const;      // whether every mapping is on the requested node

 private:
  struct Layer {
    std::unique_ptr<Arena> arena;                                // set under mutex_ by the first load
    std::unique_ptr<bool[]> claimed;                             // under mutex_
    std::unique_ptr<std::atomic<const std::byte*>[]> experts;    // published when packed
  };

  std::byte* claim(uint32_t layer, uint32_t expert);

  PackedShape shape_;
  uint32_t num_experts_;
  int numa_node_;
  mutable std::mutex mutex_;
  std::vector<Layer> layers_;
};

}  // namespace moebius
