#include "kernels/moe/expert_store.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/moe/digest.h"
#include "kernels/moe/huge_pages.h"
#include "kernels/moe/random_weights.h"
#include "kernels/pool/thread_pool.h"

namespace moebius {

ExpertStore::ExpertStore(const EngineOptions& options)
    : num_experts_(options.num_experts), numa_node_(options.numa_node), layers_(options.num_layers) {
  std::vector<LayerFormats> distinct;
  for (const LayerFormats& formats : options.formats) {
    const auto known = std::find(distinct.begin(), distinct.end(), formats);
    layout_index_.push_back(static_cast<uint32_t>(known - distinct.begin()));
    if (known != distinct.end()) continue;
    distinct.push_back(formats);
    layouts_.emplace_back(formats.gate_up, formats.down, options.hidden_size, options.intermediate_size,
                          options.is_gated(), options.has_bias);
  }
  for (Layer& layer : layers_) {
    layer.claimed = std::make_unique<bool[]>(num_experts_);
    layer.slots = std::make_unique<uint32_t[]>(num_experts_);
    std::fill_n(layer.slots.get(), num_experts_, kNoSlot);
    layer.capacity = num_experts_;
    layer.experts = std::make_unique<std::atomic<const std::byte*>[]>(num_experts_);
  }
}

void ExpertStore::reserve(uint32_t layer_index, uint32_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  Layer& layer = layers_[layer_index];
  if (count == 0 || count > num_experts_) {
    throw std::invalid_argument("layer " + std::to_string(layer_index) + ": room for " + std::to_string(count) +
                                " experts is not possible; allowed are 1 to " + std::to_string(num_experts_));
  }
  if (layer.arena) {
    throw std::invalid_argument("layer " + std::to_string(layer_index) + " has memory already; reserve it first");
  }
  layer.capacity = count;
}

PackError ExpertStore::load(uint32_t layer, uint32_t expert, const ExpertSource& source, ThreadPool& pool) {
  std::byte* target = claim(layer, expert, pool);
  PackError error;
  try {
    error = pack_expert(layout(layer), source, target);
  } catch (...) {
    release(layer, expert);
    throw;
  }
  const uint64_t seed = uint64_t{layer} << 32 | expert;
  weights_digest_.fetch_xor(digest_of(target, layout(layer).expert_bytes, seed), std::memory_order_relaxed);
  layers_[layer].experts[expert].store(target, std::memory_order_release);
  return error;
}

void ExpertStore::fill_random(uint32_t layer, uint64_t seed, ThreadPool& pool) {
  std::vector<std::byte*> targets;
  try {
    while (targets.size() < num_experts_) {
      targets.push_back(claim(layer, static_cast<uint32_t>(targets.size()), pool));
    }
  } catch (...) {
    for (uint32_t expert = 0; expert < targets.size(); ++expert) release(layer, expert);
    throw;
  }
  const ExpertLayout& layout = this->layout(layer);
  pool.parallel_for(num_experts_, [&](uint32_t expert, uint32_t) {
    fill_random_expert(layout, seed * num_experts_ + expert, targets[expert]);
    layers_[layer].experts[expert].store(targets[expert], std::memory_order_release);
  });
}

std::byte* ExpertStore::claim(uint32_t layer_index, uint32_t expert, ThreadPool& pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  Layer& layer = layers_[layer_index];
  if (layer.claimed[expert]) {
    throw std::invalid_argument("layer " + std::to_string(layer_index) + ": local expert " + std::to_string(expert) +
                                " is loaded already; each expert is loaded once");
  }
  const size_t expert_bytes = layout(layer_index).expert_bytes;
  if (layer.slots[expert] == kNoSlot && layer.used == layer.capacity) {
    throw std::invalid_argument("layer " + std::to_string(layer_index) + ": local expert " + std::to_string(expert) +
                                " has no room beside the " + std::to_string(layer.capacity) + " that were reserved");
  }
  if (!layer.arena) layer.arena = std::make_unique<Arena>(expert_bytes * layer.capacity, numa_node_, &pool);
  if (layer.slots[expert] == kNoSlot) layer.slots[expert] = layer.used++;
  layer.claimed[expert] = true;
  return layer.arena->data() + layer.slots[expert] * expert_bytes;
}

void ExpertStore::release(uint32_t layer, uint32_t expert) {
  std::lock_guard<std::mutex> lock(mutex_);
  layers_[layer].claimed[expert] = false;
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

size_t ExpertStore::huge_page_bytes() const {
  std::vector<MemoryRange> ranges;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Layer& layer : layers_) {
      if (layer.arena) ranges.push_back({layer.arena->data(), layer.arena->bytes()});
    }
  }
  return moebius::huge_page_bytes(ranges);
}

bool ExpertStore::numa_bound() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(layers_.begin(), layers_.end(),
                     [](const Layer& layer) { return !layer.arena || layer.arena->bound(); });
}

}  // namespace moebius
