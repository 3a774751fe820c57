#include "kernels/moe/expert_store.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/moe/arena.h"
#include "kernels/pool/thread_pool.h"

namespace moebius {

// Spreads every bit of a number over all of the result's: the finaliser of MurmurHash3.
constexpr uint64_t spread_bits(uint64_t value) {
  value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCDull;
  value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53ull;
  return value ^ (value >> 33);
}

// Depends on every bit and its place. Four chains, so that multiplications overlap: packing is much slower. `seed`
// says what the bytes are of.
inline uint64_t digest_of(const std::byte* bytes, size_t count, uint64_t seed) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;
  uint64_t chains[4] = {seed, seed + 1, seed + 2, seed + 3};
  size_t at = 0;
  for (; at + sizeof(chains) <= count; at += sizeof(chains)) {
    uint64_t words[4];
    std::memcpy(words, bytes + at, sizeof(words));
    for (int i = 0; i < 4; ++i) chains[i] = std::rotl((chains[i] ^ words[i]) * kOdd, 29);
  }
  uint64_t digest = spread_bits(count ^ seed);
  for (; at < count; ++at) digest = (digest ^ uint64_t(bytes[at])) * kOdd;
  for (const uint64_t chain : chains) digest = spread_bits(digest ^ chain) + chain;
  return spread_bits(digest);
}

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

void ExpertStore::fill(uint32_t layer, const Writer& write, ThreadPool& pool) {
  std::vector<std::byte*> targets;
  try {
    while (targets.size() < num_experts_) {
      targets.push_back(claim(layer, static_cast<uint32_t>(targets.size()), pool));
    }
  } catch (...) {
    for (uint32_t expert = 0; expert < targets.size(); ++expert) release(layer, expert);
    throw;
  }
  pool.parallel_for(num_experts_, [&](uint32_t expert, uint32_t) {
    write(expert, targets[expert]);
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
