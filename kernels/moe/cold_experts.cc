#include "kernels/moe/cold_experts.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

namespace moebius {
namespace {

// Reads in flight; a disk is as fast as it gets with these many of this size.
constexpr int kReadThreads = 16;
constexpr size_t kPartBytes = size_t{512} << 10;
constexpr double kLargestValue = 1e100;

size_t round_down(size_t value) { return value / files::kBlock * files::kBlock; }
size_t round_up(size_t value) { return round_down(value + files::kBlock - 1); }

enum State : uint32_t { kRead = 0, kReading = 1 };

}  // namespace

// Also the read that fills it. Blocks of the file are read whole, so that an expert lies as far from a multiple of
// kBlock in memory as in the file.
struct ColdExperts::Slot final : public files::ReadWork {
  Slot(ColdExperts& owner_experts, uint32_t owner_layer, std::byte* slot_memory)
      : owner(owner_experts), layer(owner_layer), memory(slot_memory) {}

  bool read_next(std::vector<uint8_t>& scratch) override;
  size_t num_parts() const override { return parts; }

  ColdExperts& owner;
  const uint32_t layer;
  std::byte* const memory;
  uint32_t expert = kNoSlot;
  uint64_t turn = 0;      // of the latest bring() that asked for it
  uint32_t pins = 0;      // with_bytes()
  size_t parts = 0;
  std::atomic<size_t> next{0}, left{0};
  std::atomic<uint32_t> state{kRead};
  std::mutex error_mutex;
  std::string error;
};

bool ColdExperts::Slot::read_next(std::vector<uint8_t>&) {
  const size_t part = next.fetch_add(1);
  if (part >= parts) return false;
  const LayerPlan& plan = owner.layers_[layer].plan;
  const uint64_t offset = plan.offsets[expert], first = round_down(offset);
  const uint64_t begin = first + part * kPartBytes;
  const uint64_t end = std::min<uint64_t>(begin + kPartBytes, round_up(offset + plan.expert_bytes));
  const size_t needed = std::min<uint64_t>(end, offset + plan.expert_bytes) - begin;
  try {
    auto* const target = reinterpret_cast<uint8_t*>(memory + (begin - first));
    owner.file_.read(begin, end - begin, needed, target, "packed experts");
    owner.read_bytes_ += end - begin;
  } catch (const std::exception& failure) {
    const std::lock_guard lock(error_mutex);
    error = failure.what();
  }
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return true;
  // The last one; all others have written what they had to.
  if (error.empty() && !owner.is_whole_(layer, expert, memory + (offset - first))) {
    error = owner.file_.path() + " at byte " + std::to_string(offset) +
            ", where packed experts lie, has other bytes than were written: their checksum differs";
  }
  if (!error.empty()) owner.failed_(layer, expert, error);
  state.store(kRead, std::memory_order_release);
  state.notify_all();
  return true;
}

ColdExperts::ColdExperts(const std::string& path, std::vector<LayerPlan> layers, int numa_node, IsWhole is_whole,
                         Failed failed)
    : file_(path),
      is_whole_(std::move(is_whole)),
      failed_(std::move(failed)),
      numa_node_(numa_node),
      layers_(layers.size()),
      threads_(kReadThreads) {
  for (size_t index = 0; index < layers.size(); ++index) {
    Layer& layer = layers_[index];
    layer.plan = std::move(layers[index]);
    layer.stride = round_up(layer.plan.expert_bytes) + files::kBlock;
    const size_t experts = layer.plan.offsets.size();
    layer.slot_of = std::make_unique<std::atomic<uint32_t>[]>(experts);
    for (size_t expert = 0; expert < experts; ++expert) layer.slot_of[expert] = kNoSlot;
    layer.values.assign(experts, 0.0);
  }
}

ColdExperts::~ColdExperts() {
  for (Layer& layer : layers_) {
    for (const auto& slot : layer.slots) {
      slot->next = slot->parts;
      threads_.remove(slot.get());
    }
  }
}

void ColdExperts::take_memory(ThreadPool& pool) {
  size_t bytes = 0;
  for (const Layer& layer : layers_) bytes += layer.stride * layer.plan.slots;
  arena_ = std::make_unique<Arena>(bytes, numa_node_, &pool);
  std::byte* memory = arena_->data();
  for (uint32_t index = 0; index < layers_.size(); ++index) {
    Layer& layer = layers_[index];
    for (uint32_t slot = 0; slot < layer.plan.slots; ++slot, memory += layer.stride) {
      layer.slots.push_back(std::make_unique<Slot>(*this, index, memory));
    }
  }
}

std::byte* ColdExperts::place(const Layer& layer, const Slot& slot, uint32_t expert) const {
  return slot.memory + layer.plan.offsets[expert] % files::kBlock;
}

void ColdExperts::adopt(uint32_t index, uint32_t expert, const std::byte* packed) {
  const std::lock_guard lock(mutex_);
  Layer& layer = layers_[index];
  for (uint32_t number = 0; number < layer.slots.size(); ++number) {
    Slot& slot = *layer.slots[number];
    if (slot.expert != kNoSlot) continue;
    std::memcpy(place(layer, slot, expert), packed, layer.plan.expert_bytes);
    slot.expert = expert;
    layer.slot_of[expert].store(number, std::memory_order_release);
    return;
  }
}

void ColdExperts::fill(uint32_t index, const std::vector<uint32_t>& experts) {
  const std::lock_guard lock(mutex_);
  Layer& layer = layers_[index];
  uint32_t number = 0;
  for (const uint32_t expert : experts) {
    while (number < layer.slots.size() && layer.slots[number]->expert != kNoSlot) ++number;
    if (number == layer.slots.size()) return;
    if (layer.slot_of[expert] == kNoSlot) start(index, expert, *layer.slots[number]);
  }
}

uint32_t ColdExperts::most_together(uint32_t index) const {
  const LayerPlan& plan = layers_[index].plan;
  const auto held = static_cast<size_t>(std::count_if(plan.offsets.begin(), plan.offsets.end(),
                                                      [](uint64_t offset) { return offset != kNotHeld; }));
  // One may be pinned by with_bytes().
  return plan.slots >= held ? plan.slots : plan.slots - 1;
}

void ColdExperts::use(Layer& layer, uint32_t expert) {
  layer.values[expert] += layer.increment;
  if (layer.increment < kLargestValue) return;
  for (double& value : layer.values) value /= layer.increment;
  layer.increment = 1.0;
}

ColdExperts::Slot& ColdExperts::least_valuable(Layer& layer) {
  // Before it, nothing is needed: it is of another call, or of a turn that has been computed.
  const uint64_t kept_from = std::max(call_begin_, turn_ - 1);
  Slot* least = nullptr;
  for (const auto& slot : layer.slots) {
    if (slot->expert == kNoSlot) return *slot;
    if (slot->turn >= kept_from || slot->pins > 0) continue;
    if (least == nullptr || layer.values[slot->expert] < layer.values[least->expert]) least = slot.get();
  }
  if (least == nullptr) throw std::logic_error("a call has brought more experts than there are slots");
  return *least;
}

void ColdExperts::start(uint32_t index, uint32_t expert, Slot& slot) {
  Layer& layer = layers_[index];
  // One that was read for a call that has failed may be under way.
  slot.next = slot.parts;
  threads_.remove(&slot);
  if (slot.expert != kNoSlot) layer.slot_of[slot.expert].store(kNoSlot, std::memory_order_release);
  const uint64_t offset = layer.plan.offsets[expert];
  const size_t bytes = round_up(offset + layer.plan.expert_bytes) - round_down(offset);
  slot.expert = expert;
  slot.error.clear();
  slot.parts = (bytes + kPartBytes - 1) / kPartBytes;
  slot.left = slot.parts;
  slot.next = 0;
  slot.state.store(kReading, std::memory_order_release);
  const auto same = [&](const auto& other) { return other.get() == &slot; };
  const auto number = std::find_if(layer.slots.begin(), layer.slots.end(), same) - layer.slots.begin();
  layer.slot_of[expert].store(static_cast<uint32_t>(number), std::memory_order_release);
  threads_.add(&slot);
}

void ColdExperts::bring(uint32_t index, std::span<const RowGroups::Group> experts, bool is_first) {
  const std::lock_guard lock(mutex_);
  Layer& layer = layers_[index];
  ++turn_;
  if (is_first) {
    call_begin_ = turn_;
    layer.increment *= std::exp2(1.0 / kHalfLife);
  }
  uint64_t missed = 0;
  for (const RowGroups::Group& group : experts) {
    const uint32_t slot = layer.slot_of[group.expert];
    if (slot == kNoSlot) continue;
    layer.slots[slot]->turn = turn_;
    use(layer, group.expert);
  }
  for (const RowGroups::Group& group : experts) {
    if (layer.slot_of[group.expert] != kNoSlot) continue;
    Slot& slot = least_valuable(layer);
    slot.turn = turn_;
    use(layer, group.expert);
    start(index, group.expert, slot);
    ++missed;
  }
  used_ += experts.size();
  missed_ += missed;
}

const std::byte* ColdExperts::find(uint32_t index, uint32_t expert) const {
  const Layer& layer = layers_[index];
  const uint32_t slot = layer.slot_of[expert].load(std::memory_order_acquire);
  return slot == kNoSlot ? nullptr : place(layer, *layer.slots[slot], expert);
}

bool ColdExperts::is_read(uint32_t index, uint32_t expert) const {
  const Layer& layer = layers_[index];
  const uint32_t slot = layer.slot_of[expert].load(std::memory_order_acquire);
  return slot != kNoSlot && layer.slots[slot]->state.load(std::memory_order_acquire) == kRead;
}

void ColdExperts::await(uint32_t index, uint32_t expert) {
  const Layer& layer = layers_[index];
  const uint32_t number = layer.slot_of[expert].load(std::memory_order_acquire);
  if (number == kNoSlot) return;
  Slot& slot = *layer.slots[number];
  if (slot.state.load(std::memory_order_acquire) == kRead) return;
  const auto begin = std::chrono::steady_clock::now();
  slot.state.wait(kReading, std::memory_order_acquire);
  const auto waited = std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
  waited_nanoseconds_ += static_cast<uint64_t>(waited);
}

bool ColdExperts::with_bytes(uint32_t index, uint32_t expert, const std::function<void(const std::byte*)>& use) {
  Layer& layer = layers_[index];
  Slot* slot = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const uint32_t number = layer.slot_of[expert];
    if (number == kNoSlot || layer.slots[number]->state.load(std::memory_order_acquire) == kReading) return false;
    slot = layer.slots[number].get();
    ++slot->pins;
  }
  use(place(layer, *slot, expert));
  const std::lock_guard lock(mutex_);
  --slot->pins;
  return true;
}

void ColdExperts::put(uint32_t index, uint32_t expert, const std::byte* packed) {
  const std::lock_guard lock(mutex_);
  Layer& layer = layers_[index];
  const uint32_t slot = layer.slot_of[expert];
  if (slot != kNoSlot) std::memcpy(place(layer, *layer.slots[slot], expert), packed, layer.plan.expert_bytes);
}

bool ColdExperts::reread(uint32_t index, uint32_t expert) {
  const LayerPlan& plan = layers_[index].plan;
  const uint64_t offset = plan.offsets[expert], first = round_down(offset);
  const size_t bytes = round_up(offset + plan.expert_bytes) - first;
  std::vector<uint8_t> scratch;
  uint8_t* const blocks = files::aligned(scratch, bytes);
  file_.read(first, bytes, offset - first + plan.expert_bytes, blocks, "packed experts");
  return is_whole_(index, expert, reinterpret_cast<std::byte*>(blocks + (offset - first)));
}

MemoryRange ColdExperts::memory() const {
  return arena_ ? MemoryRange{arena_->data(), arena_->bytes()} : MemoryRange{nullptr, 0};
}

ColdCounters ColdExperts::counters() const { return {used_, missed_, read_bytes_, waited_nanoseconds_}; }

}  // namespace moebius
