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
      if (segment_->stays_in_file()) {
        publish(index, expert, nullptr, found->digest, Trust::kWhole);  // compared whenever it is read
      } else {
        publish(index, expert, segment_->slot(index, expert_begin_ + expert), found->digest, Trust::kUnchecked);
      }
    }
    layer.used = layer.capacity;
    // A layer whose load was interrupted lacks pages.
    const auto known = layer.claimed.get();
    if (std::count(known, known + num_experts_, true) < layer.capacity) layer.memory = {nullptr, 0};
  }
  if (segment_->stays_in_file()) plan_slots(options);
}

// Every layer has the same share of its experts in memory: a token uses as many of each.
void ExpertStore::plan_slots(const EngineOptions& options) {
  double all = 0.0, least = 0.0;
  const auto slot_bytes = [&](uint32_t layer) { return double(layout(layer).expert_bytes + 2 * files::kBlock); };
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    all += layers_[layer].capacity * slot_bytes(layer);
    least += std::min(layers_[layer].capacity, ColdExperts::kFewestSlots) * slot_bytes(layer);
  }
  const auto bytes = static_cast<double>(options.segment.slot_bytes);
  if (bytes < least) {
    throw std::invalid_argument("expert weights: " + std::to_string(options.segment.slot_bytes >> 20) +
                                " MiB of memory for experts are too few; " + std::to_string(ColdExperts::kFewestSlots) +
                                " of each layer take " + std::to_string((uint64_t(least) >> 20) + 1) + " MiB");
  }
  std::vector<ColdExperts::LayerPlan> plans;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    const uint32_t held = layers_[layer].capacity;
    const auto share = static_cast<uint32_t>(std::min(1.0, bytes / std::max(all, 1.0)) * held);
    ColdExperts::LayerPlan plan{layout(layer).expert_bytes,
                                std::clamp(share, std::min(held, ColdExperts::kFewestSlots), held),
                                std::vector<uint64_t>(num_experts_, ColdExperts::kNotHeld)};
    for (uint32_t expert = 0; expert < num_experts_; ++expert) {
      if (layers_[layer].slots[expert] == kNoSlot) continue;
      plan.offsets[expert] = segment_->offset(layer, expert_begin_ + expert);
    }
    plans.push_back(std::move(plan));
  }
  const auto is_whole = [this](uint32_t layer, uint32_t expert, const std::byte* packed) {
    const uint64_t found = weights::digest_of(packed, layout(layer).expert_bytes, digest_seed(layer, expert));
    return found == layers_[layer].digests[expert];
  };
  const auto failed = [this](uint32_t layer, uint32_t expert, const std::string& reason) {
    read_failed(layer, expert, reason);
  };
  cold_ = std::make_unique<ColdExperts>(options.segment.path, std::move(plans), numa_node_, is_whole, failed);
}

void ExpertStore::read_failed(uint32_t layer, uint32_t expert, const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    read_problem_ = reason;
  }
  if (mark_damaged(layer, expert) && report_) report_(layer, expert);
}

std::string ExpertStore::read_problem() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return read_problem_;
}

void ExpertStore::fill_slots() {
  std::vector<std::vector<uint32_t>> packed(cold_ ? layers_.size() : 0);
  for (uint32_t layer = 0; layer < packed.size(); ++layer) {
    for (uint32_t expert = 0; expert < num_experts_; ++expert) {
      if (holds(layer, expert) && trust(layer, expert) != Trust::kDamaged) packed[layer].push_back(expert);
    }
    cold_->fill(layer, packed[layer]);
  }
  for (uint32_t layer = 0; layer < packed.size(); ++layer) {
    for (const uint32_t expert : packed[layer]) cold_->await(layer, expert);
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
    AlignedBytes own;
    if (cold_) {
      own = memory_for(layer);
      target = own.get();
    }
    error = pack_expert(layout(layer), source, target);
    finish(layer, expert, target, error);
  } catch (...) {
    release(layer, expert);
    throw;
  }
  return error;
}

void ExpertStore::finish(uint32_t layer, uint32_t expert, const std::byte* packed, const PackError& error) {
  const uint64_t digest = weights::digest_of(packed, layout(layer).expert_bytes, digest_seed(layer, expert));
  if (cold_) {
    segment_->write_to_file(segment_->offset(layer, expert_begin_ + expert), packed, layout(layer).expert_bytes);
  }
  if (segment_) {
    weights::ExpertRecord& record = *segment_->expert(layer, expert_begin_ + expert);
    segment_->set_packed(record, digest, error.squared_error, error.squared_reference);
  }
  publish(layer, expert, cold_ ? nullptr : packed, digest, Trust::kWhole);
  if (cold_) cold_->adopt(layer, expert, packed);
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
  const uint64_t digest = layers_[layer].digests[expert];
  std::atomic<Trust>& trust = layers_[layer].trust[expert];
  Trust before = trust.load(std::memory_order_acquire);
  if (before == Trust::kDamaged) return Verdict::kKnownDamaged;
  bool whole = true;
  const auto compare = [&](const std::byte* packed) {
    whole = weights::digest_of(packed, layout(layer).expert_bytes, digest_seed(layer, expert)) == digest;
  };
  if (cold_) {
    cold_->with_bytes(layer, expert, compare);  // what is only in the file is compared when it is read
  } else {
    const std::byte* const packed = find(layer, expert);
    if (packed == nullptr || digest == 0) return Verdict::kWhole;
    compare(packed);
  }
  if (!whole) return mark_damaged(layer, expert) ? Verdict::kFound : Verdict::kKnownDamaged;
  // Other threads may have looked at the same time.
  do {
    if (before == Trust::kDamaged) return Verdict::kKnownDamaged;
    if (before == Trust::kWhole) return Verdict::kWhole;
  } while (!trust.compare_exchange_weak(before, Trust::kWhole, std::memory_order_acq_rel));
  suspects_.fetch_sub(1, std::memory_order_release);
  if (unchecked_.fetch_sub(1, std::memory_order_acq_rel) == 1) note_checked();
  return Verdict::kWhole;
}

// False: it was marked before.
bool ExpertStore::mark_damaged(uint32_t layer, uint32_t expert) {
  const Trust before = layers_[layer].trust[expert].exchange(Trust::kDamaged, std::memory_order_acq_rel);
  if (before == Trust::kDamaged) return false;
  if (before == Trust::kWhole) suspects_.fetch_add(1, std::memory_order_release);
  if (segment_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    segment_->set_missing(*segment_->expert(layer, expert_begin_ + expert));
  }
  if (before == Trust::kUnchecked && unchecked_.fetch_sub(1, std::memory_order_acq_rel) == 1) note_checked();
  return true;
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
  const size_t count = layout(layer).expert_bytes;
  AlignedBytes packed = memory_for(layer);
  pack_expert(layout(layer), source, packed.get());
  const bool same = weights::digest_of(packed.get(), count, digest_seed(layer, expert)) == layers_[layer].digests[expert];
  return same ? std::move(packed) : AlignedBytes();
}

// Zeroed, as an arena's is.
AlignedBytes ExpertStore::memory_for(uint32_t layer) const {
  constexpr size_t kAlignment = 4096;
  const size_t count = layout(layer).expert_bytes;
  const size_t whole = (count + kAlignment - 1) / kAlignment * kAlignment;
  AlignedBytes memory(static_cast<std::byte*>(std::aligned_alloc(kAlignment, whole)));
  if (!memory) throw std::bad_alloc();
  std::memset(memory.get(), 0, count);
  return memory;
}

bool ExpertStore::replace(uint32_t layer_index, uint32_t expert, const AlignedBytes& packed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Layer& layer = layers_[layer_index];
  const size_t count = layout(layer_index).expert_bytes;
  if (cold_) {
    segment_->write_to_file(segment_->offset(layer_index, expert_begin_ + expert), packed.get(), count);
    if (!cold_->reread(layer_index, expert)) return false;
    cold_->put(layer_index, expert, packed.get());
  } else {
    const std::byte* const known = find(layer_index, expert);
    if (segment_) {
      segment_->write(segment_->slot(layer_index, expert_begin_ + expert), packed.get(), count);
    } else {
      std::memcpy(layer.arena->data() + layer.slots[expert] * count, packed.get(), count);
    }
    if (weights::digest_of(known, count, digest_seed(layer_index, expert)) != layer.digests[expert]) return false;
  }
  if (segment_) segment_->set_repaired(*segment_->expert(layer_index, expert_begin_ + expert));
  if (layer.trust[expert].exchange(Trust::kWhole) == Trust::kDamaged) suspects_.fetch_sub(1, std::memory_order_release);
  return true;
}

const weights::ExpertRecord* ExpertStore::record(uint32_t layer, uint32_t expert) const {
  if (!segment_ || !holds(layer, expert)) return nullptr;
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
  if (cold_) return cold_->find(layer, expert);
  return layers_[layer].experts[expert].load(std::memory_order_acquire);
}

bool ExpertStore::holds(uint32_t layer, uint32_t expert) const {
  if (!cold_) return find(layer, expert) != nullptr;
  const weights::ExpertRecord* const record = segment_->expert(layer, expert_begin_ + expert);
  return record != nullptr && (segment_->is_packed(*record) || trust(layer, expert) == Trust::kDamaged);
}

size_t ExpertStore::packed_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t bytes = 0;
  for (const MemoryRange& range : memory()) bytes += range.bytes;
  return bytes;
}

size_t ExpertStore::huge_page_bytes() const {
  std::vector<MemoryRange> ranges;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges = memory();
  }
  return moebius::huge_page_bytes(ranges);
}

std::vector<MemoryRange> ExpertStore::memory() const {
  if (cold_) return {cold_->memory()};
  std::vector<MemoryRange> ranges;
  for (const Layer& layer : layers_) {
    if (layer.memory.bytes > 0) ranges.push_back(layer.memory);
  }
  return ranges;
}

bool ExpertStore::numa_bound() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (cold_) return cold_->bound();
  if (segment_ && !segment_->bound()) return false;
  return std::all_of(layers_.begin(), layers_.end(),
                     [](const Layer& layer) { return !layer.arena || layer.arena->bound(); });
}

}  // namespace moebius
