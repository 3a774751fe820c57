#include "kernels/moe/expert_store.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/moe/arena.h"
#include "kernels/pool/thread_pool.h"

namespace moebius {

namespace {

// A digest seed for a packed expert, by which its bytes differ from another one's.
uint64_t digest_seed(uint32_t layer, uint32_t expert) { return uint64_t{layer} << 32 | expert; }

}  // namespace

ExpertStore::ExpertStore(const EngineOptions& options)
    : num_experts_(options.num_experts),
      expert_begin_(options.expert_begin),
      numa_node_(options.numa_node),
      layers_(options.num_layers) {
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
    layer.digests = std::make_unique<uint64_t[]>(num_experts_);
    layer.trust = std::make_unique<std::atomic<Trust>[]>(num_experts_);
  }
  if (!options.segment.path.empty()) attach(options);
}

// Publishes experts that are packed already; none is read until it is needed, or verified.
void ExpertStore::attach(const EngineOptions& options) {
  segment_ = std::make_unique<weights::Segment>(options.segment, options, layouts_, layout_index_);
  for (uint32_t index = 0; index < layers_.size(); ++index) {
    Layer& layer = layers_[index];
    layer.capacity = 0;
    for (uint32_t expert = 0; expert < num_experts_; ++expert) {
      const weights::ExpertRecord* found = segment_->expert(index, expert_begin_ + expert);
      if (found == nullptr) continue;
      layer.slots[expert] = layer.capacity++;
      if (!segment_->is_packed(*found)) continue;
      layer.claimed[expert] = true;
      layer.memory = segment_->memory(segment_->record_of(index));
      publish(index, expert, segment_->slot(index, expert_begin_ + expert), found->digest, Trust::kUnchecked);
    }
    layer.used = layer.capacity;
    // A layer whose load was interrupted lacks pages.
    const auto known = layer.claimed.get();
    if (std::count(known, known + num_experts_, true) < layer.capacity) layer.memory = {nullptr, 0};
  }
}

void ExpertStore::reserve(uint32_t layer_index, uint32_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  Layer& layer = layers_[layer_index];
  if (count == 0 || count > num_experts_) {
    throw std::invalid_argument("layer " + std::to_string(layer_index) + ": room for " + std::to_string(count) +
                                " experts is not possible; allowed are 1 to " + std::to_string(num_experts_));
  }
  if (layer.arena || segment_) {
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
  finish(layer, expert, target, error);
  return error;
}

void ExpertStore::finish(uint32_t layer, uint32_t expert, const std::byte* packed, const PackError& error) {
  const uint64_t digest = weights::digest_of(packed, layout(layer).expert_bytes, digest_seed(layer, expert));
  if (segment_) {
    weights::ExpertRecord& record = *segment_->expert(layer, expert_begin_ + expert);
    segment_->set_packed(record, digest, error.squared_error, error.squared_reference);
  }
  publish(layer, expert, packed, digest, Trust::kWhole);
}

void ExpertStore::publish(uint32_t layer, uint32_t expert, const std::byte* packed, uint64_t digest, Trust trust) {
  weights_digest_.fetch_xor(digest, std::memory_order_relaxed);
  layers_[layer].digests[expert] = digest;
  layers_[layer].trust[expert].store(trust, std::memory_order_relaxed);
  if (trust == Trust::kUnchecked) {
    unchecked_.fetch_add(1, std::memory_order_relaxed);
    suspects_.fetch_add(1, std::memory_order_release);
  }
  layers_[layer].experts[expert].store(packed, std::memory_order_release);
}

Verdict ExpertStore::verify(uint32_t layer, uint32_t expert) {
  const std::byte* const packed = find(layer, expert);
  const uint64_t digest = layers_[layer].digests[expert];
  if (packed == nullptr || digest == 0) return Verdict::kWhole;
  std::atomic<Trust>& trust = layers_[layer].trust[expert];
  Trust before = trust.load(std::memory_order_acquire);
  if (before == Trust::kDamaged) return Verdict::kKnownDamaged;
  const bool whole = weights::digest_of(packed, layout(layer).expert_bytes, digest_seed(layer, expert)) == digest;
  const Trust now = whole ? Trust::kWhole : Trust::kDamaged;
  // Other threads may have looked at the same time.
  do {
    if (before == Trust::kDamaged) return Verdict::kKnownDamaged;
    if (before == now) return Verdict::kWhole;
  } while (!trust.compare_exchange_weak(before, now, std::memory_order_acq_rel));
  if (whole) {
    suspects_.fetch_sub(1, std::memory_order_release);
  } else {
    if (before == Trust::kWhole) suspects_.fetch_add(1, std::memory_order_release);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (segment_) segment_->set_missing(*segment_->expert(layer, expert_begin_ + expert));
  }
  if (before == Trust::kUnchecked && unchecked_.fetch_sub(1, std::memory_order_acq_rel) == 1) note_checked();
  return whole ? Verdict::kWhole : Verdict::kFound;
}

Trust ExpertStore::trust(uint32_t layer, uint32_t expert) const {
  return layers_[layer].trust[expert].load(std::memory_order_acquire);
}

// A damaged expert keeps the segment from being complete, so that this alone does not invite readers.
void ExpertStore::note_checked() {
  if (segment_) segment_->set_checked(true);
}

void ExpertStore::finish(const std::string& load_record) {
  if (!segment_) return;
  segment_->finish(load_record);
  if (unchecked_.load(std::memory_order_acquire) == 0) note_checked();
}

AlignedBytes ExpertStore::pack_again(uint32_t layer, uint32_t expert, const ExpertSource& source) const {
  constexpr size_t kAlignment = 4096;
  const size_t count = layout(layer).expert_bytes;
  AlignedBytes packed(static_cast<std::byte*>(std::aligned_alloc(kAlignment, (count + kAlignment - 1) / kAlignment * kAlignment)));
  if (!packed) throw std::bad_alloc();
  std::memset(packed.get(), 0, count);
  pack_expert(layout(layer), source, packed.get());
  const bool same = weights::digest_of(packed.get(), count, digest_seed(layer, expert)) == layers_[layer].digests[expert];
  return same ? std::move(packed) : AlignedBytes();
}

bool ExpertStore::replace(uint32_t layer_index, uint32_t expert, const AlignedBytes& packed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Layer& layer = layers_[layer_index];
  const size_t count = layout(layer_index).expert_bytes;
  const std::byte* const known = find(layer_index, expert);
  if (segment_) {
    segment_->write(segment_->slot(layer_index, expert_begin_ + expert), packed.get(), count);
  } else {
    std::memcpy(layer.arena->data() + layer.slots[expert] * count, packed.get(), count);
  }
  if (weights::digest_of(known, count, digest_seed(layer_index, expert)) != layer.digests[expert]) return false;
  if (segment_) segment_->set_repaired(*segment_->expert(layer_index, expert_begin_ + expert));
  if (layer.trust[expert].exchange(Trust::kWhole) == Trust::kDamaged) suspects_.fetch_sub(1, std::memory_order_release);
  return true;
}

const weights::ExpertRecord* ExpertStore::record(uint32_t layer, uint32_t expert) const {
  if (!segment_ || find(layer, expert) == nullptr) return nullptr;
  return segment_->expert(layer, expert_begin_ + expert);
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
    if (segment_) {
      finish(layer, expert, targets[expert], {});
    } else {
      publish(layer, expert, targets[expert], 0, Trust::kWhole);
    }
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
                                " has no room next to the " + std::to_string(layer.capacity) + " that were reserved");
  }
  if (layer.memory.data == nullptr) take_memory(layer_index, pool);
  if (layer.slots[expert] == kNoSlot) layer.slots[expert] = layer.used++;
  layer.claimed[expert] = true;
  if (segment_) return segment_->slot(layer_index, expert_begin_ + expert);
  return layer.arena->data() + layer.slots[expert] * expert_bytes;
}

void ExpertStore::take_memory(uint32_t index, ThreadPool& pool) {
  Layer& layer = layers_[index];
  if (segment_) {
    segment_->prepare(segment_->record_of(index), pool);
    layer.memory = segment_->memory(segment_->record_of(index));
  } else {
    layer.arena = std::make_unique<Arena>(layout(index).expert_bytes * layer.capacity, numa_node_, &pool);
    layer.memory = {layer.arena->data(), layer.arena->bytes()};
  }
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
  for (const Layer& layer : layers_) bytes += layer.memory.bytes;
  return bytes;
}

size_t ExpertStore::huge_page_bytes() const {
  std::vector<MemoryRange> ranges;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Layer& layer : layers_) {
      if (layer.memory.bytes > 0) ranges.push_back(layer.memory);
    }
  }
  return moebius::huge_page_bytes(ranges);
}

bool ExpertStore::numa_bound() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (segment_ && !segment_->bound()) return false;
  return std::all_of(layers_.begin(), layers_.end(),
                     [](const Layer& layer) { return !layer.arena || layer.arena->bound(); });
}

}  // namespace moebius
