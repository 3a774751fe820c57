#include "kernels/moe/expert_store.h"

#include <stdexcept>
#include <string>

namespace moebius {

ExpertStore::ExpertStore(const PackedShape& shape, uint32_t num_layers, uint32_t num_experts, int numa_node)
    : shape_(shape), num_experts_(num_experts), numa_node_(numa_node), layers_(num_layers) {
  for (Layer& layer : layers_) {
    layer.claimed = std::make_unique<bool[]>(num_experts);
    layer.experts = std::make_unique<std::atomic<const std::byte*>[]>(num_experts);
  }
}

void ExpertStore::load(uint32_t layer, uint32_t expert, const ExpertWeights& weights) {
  std::byte* target = claim(layer, expert);
  pack_expert(shape_, weights, target);
  layers_[layer].experts[expert].store(target, std::memory_order_release);
}

std::byte* ExpertStore::claim(uint32_t layer_index, uint32_t expert) {
  std::lock_guard<std::mutex> lock(mutex_);
  Layer& layer = layers_[layer_index];
  if (layer.claimed[expert]) {
    throw std::invalid_argument("layer " + std::to_string(layer_index) + ": local expert " + std::to_string(expert) +
                                " is loaded already; each expert is loaded once");
  }
  if (!layer.arena) layer.arena = std::make_unique<Arena>(shape_.expert_bytes * num_experts_, numa_node_);
  layer.claimed[expert] = true;
  return layer.arena->data() + expert * shape_.expert_bytes;
}

const std::byte* ExpertStore::find(uint32_t layer, uint32_t expert) const {
  return layers_[layer].experts[expert].load(std::memory_order_acquire);
}

size_t ExpertStore::packed_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t bytes = 0;
  for (const Layer& layer : layers_) bytes += layer.arena ? layer.arena->bytes() : 0;
  return bytes;
}

bool ExpertStore::numa_bound() const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Layer& layer : layers_) {
    if (layer.arena && !layer.arena->bound()) return false;
  }
  return true;
}

}  // namespace moebius
