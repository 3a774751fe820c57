// Packed experts of all layers. A layer takes memory when its first expert is loaded: private, or of a segment that
// other processes read (weight_segment.h), in which experts may be packed already. Where the segment's data stays in a
// file, only some experts are in memory at a time (cold_experts.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/format/expert_packing.h"
#include "kernels/format/panel_layout.h"
#include "kernels/moe/arena.h"
#include "kernels/moe/cold_experts.h"
#include "kernels/moe/engine_options.h"

namespace moebius {

// A packed expert in memory of its own, 64-byte aligned.
struct FreeBytes {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using AlignedBytes = std::unique_ptr<std::byte[], FreeBytes>;

class ThreadPool;

// The state of a packed expert's bytes. kUnchecked: a predecessor packed them. kDamaged: they are not those that
// were packed.
enum class Trust : uint8_t { kUnchecked = 0, kWhole = 1, kDamaged = 2 };
// The result of comparing an expert's bytes with its checksum. kFound: damaged, and first found by this thread.
enum class Verdict { kWhole, kFound, kKnownDamaged };

class ExpertStore {
 public:
  // options as checked_options returns them.
  explicit ExpertStore(const EngineOptions& options);

  // Limits a layer's memory to `count` of its experts, any of them. Throws std::invalid_argument when
  // count is 0 or above num_experts(), when an expert of the layer was loaded before, or when a segment says which.
  void reserve(uint32_t layer, uint32_t count);

  // Packs one expert (local index). Different experts may be loaded from several threads at once. The first of a
  // layer maps its memory and has the pool's threads touch it. Returns what the rounding to the layer's format
  // cost. Throws std::invalid_argument when it was loaded before, when the source does not fit (such an expert may be
  // loaded again), or when it is one more than was reserved.
  PackError load(uint32_t layer, uint32_t expert, const ExpertSource& source, ThreadPool& pool);

  // Has `write` write every expert of a layer, layout(layer).expert_bytes each, on all threads of the pool: for
  // benchmarks. Throws std::invalid_argument when one was loaded before.
  using Writer = std::function<void(uint32_t expert, std::byte* target)>;
  void fill(uint32_t layer, const Writer& write, ThreadPool& pool);

  // Whether an expert's bytes are still those that were packed; reads all of them. When they are not, the expert is
  // damaged from now on, and missing for the segment's next user. kWhole for one that is not loaded, or was
  // filled. From any thread, but not while the expert is replaced.
  Verdict verify(uint32_t layer, uint32_t expert);
  Trust trust(uint32_t layer, uint32_t expert) const;
  // Whether every expert's is kWhole.
  bool is_trusted() const { return suspects_.load(std::memory_order_acquire) == 0; }
  // Packs a damaged expert again, into memory of its own. Empty: the source is not what was packed. Throws
  // std::invalid_argument when it does not fit.
  AlignedBytes pack_again(uint32_t layer, uint32_t expert, const ExpertSource& source) const;
  // Puts what pack_again() returned where the damaged expert is; it must not be read meanwhile. False: the memory
  // does not keep it, and the expert stays damaged.
  bool replace(uint32_t layer, uint32_t expert, const AlignedBytes& packed);
  // Every expert of the segment is packed.
  void finish(const std::string& load_record);
  // Returns the rounding error of an expert of the segment; null without one, or while it is not packed.
  const weights::ExpertRecord* record(uint32_t layer, uint32_t expert) const;
  weights::Segment* segment() const { return segment_.get(); }  // null: private memory

  // The packed expert, or null while it is not loaded, or only in the file.
  const std::byte* find(uint32_t layer, uint32_t expert) const;
  // Whether the expert is loaded, in memory or in the file.
  bool holds(uint32_t layer, uint32_t expert) const;
  // Null: all experts are in memory.
  ColdExperts* cold() const { return cold_.get(); }
  // Fills free slots from the file, and waits for it; nothing without cold experts.
  void fill_slots();
  // Called by another thread when an expert in the file is found damaged, or can not be read.
  void on_damage(std::function<void(uint32_t layer, uint32_t expert)> report) { report_ = std::move(report); }
  // Why the latest such expert is; empty: none was.
  std::string read_problem() const;

  uint32_t num_layers() const { return static_cast<uint32_t>(layers_.size()); }
  uint32_t num_experts() const { return num_experts_; }
  const ExpertLayout& layout(uint32_t layer) const { return layouts_[layout_index_[layer]]; }
  uint32_t layout_index(uint32_t layer) const { return layout_index_[layer]; }
  const std::vector<ExpertLayout>& layouts() const { return layouts_; }  // the distinct ones
  // Returns a digest of all that load() has packed, here or in a predecessor, in any order; 0: nothing. Ids are local.
  uint64_t weights_digest() const { return weights_digest_.load(std::memory_order_relaxed); }
  size_t packed_bytes() const;  // mapped for layers so far; with cold experts, the memory of slots
  size_t huge_page_bytes() const;  // of them in 2 MiB pages now; see arena.h for how exact and how slow
  bool numa_bound() const;      // whether every mapping is on the requested node

 private:
  static constexpr uint32_t kNoSlot = UINT32_MAX;

  struct Layer {
    std::unique_ptr<Arena> arena;                                // set under mutex_ by the first load; null: segment
    MemoryRange memory{nullptr, 0};                              // taken so far, under mutex_
    std::unique_ptr<bool[]> claimed;                             // under mutex_
    std::unique_ptr<uint32_t[]> slots;                           // under mutex_; kNoSlot: none yet
    uint32_t capacity = 0;                                       // slots of the arena
    uint32_t used = 0;                                           // of them, given to experts, under mutex_
    std::unique_ptr<std::atomic<const std::byte*>[]> experts;    // published when packed
    std::unique_ptr<uint64_t[]> digests;                         // of those; 0: unknown, of what was filled
    std::unique_ptr<std::atomic<Trust>[]> trust;                 // of those
  };

  std::byte* claim(uint32_t layer, uint32_t expert, ThreadPool& pool);
  void take_memory(uint32_t layer, ThreadPool& pool);
  void finish(uint32_t layer, uint32_t expert, const std::byte* packed, const PackError& error);
  void publish(uint32_t layer, uint32_t expert, const std::byte* packed, uint64_t digest, Trust trust);
  void note_checked();
  void attach(const EngineOptions& options);
  void plan_slots(const EngineOptions& options);
  bool mark_damaged(uint32_t layer, uint32_t expert);
  void read_failed(uint32_t layer, uint32_t expert, const std::string& reason);
  AlignedBytes memory_for(uint32_t layer) const;
  std::vector<MemoryRange> memory() const;  // with mutex_
  void release(uint32_t layer, uint32_t expert);

  std::atomic<uint64_t> weights_digest_{0};
  std::atomic<uint64_t> suspects_{0};   // loaded experts that are not whole
  std::atomic<uint64_t> unchecked_{0};  // of them, not compared yet
  uint32_t num_experts_;
  uint32_t expert_begin_;
  int numa_node_;
  std::vector<ExpertLayout> layouts_;
  std::vector<uint32_t> layout_index_;  // [layers]
  mutable std::mutex mutex_;
  std::vector<Layer> layers_;
  std::unique_ptr<weights::Segment> segment_;
  std::function<void(uint32_t, uint32_t)> report_;
  std::string read_problem_;  // under mutex_
  std::unique_ptr<ColdExperts> cold_;  // last: its threads use the rest
};

}  // namespace moebius
