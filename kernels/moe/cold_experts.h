// Experts of a server that has less memory than they take: all lie packed in a file, and each layer has slots in memory
// for some of them. A call's experts that have no slot get those of the least used ones, and are read while the others
// are computed.
//
// Which are kept: each call adds to the value of the experts that it uses, and values halve within kHalfLife calls of a
// layer; the lowest gives way. A read's bytes are compared with the checksum that packing gave them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kernels/files/direct_reads.h"
#include "kernels/moe/arena.h"
#include "kernels/moe/row_groups.h"

namespace moebius {

// What was read, since the start.
struct ColdCounters {
  uint64_t used = 0;       // experts that calls needed
  uint64_t missed = 0;     // of them, those that had no slot
  uint64_t read_bytes = 0; // also of the first fill
  uint64_t waited_nanoseconds = 0;  // of all threads together, for reads
};

class ColdExperts {
 public:
  // With fewer a call could not keep what it computes, what it reads for its next turn, and one that is verified.
  static constexpr uint32_t kFewestSlots = 3;
  static constexpr double kHalfLife = 2000.0;

  // Filled by the store, for each layer; without experts held here, slots is 0.
  struct LayerPlan {
    size_t expert_bytes;
    uint32_t slots;                  // at least kFewestSlots, or all
    std::vector<uint64_t> offsets;   // [experts] in the file; kNotHeld: not held here
  };
  static constexpr uint64_t kNotHeld = UINT64_MAX;

  // A reading thread asks `is_whole` whether bytes are what was packed; `failed` is called, by it, for a read that
  // was not, or failed, with the reason. Throws files::ReadError.
  using IsWhole = std::function<bool(uint32_t layer, uint32_t expert, const std::byte* packed)>;
  using Failed = std::function<void(uint32_t layer, uint32_t expert, const std::string& reason)>;
  ColdExperts(const std::string& path, std::vector<LayerPlan> layers, int numa_node, IsWhole is_whole, Failed failed);
  ~ColdExperts();
  ColdExperts(const ColdExperts&) = delete;
  ColdExperts& operator=(const ColdExperts&) = delete;

  // Takes the memory of all slots, before anything else; the pool's threads touch its pages. Throws std::bad_alloc.
  void take_memory(ThreadPool& pool);
  // Puts a packed expert into a free slot, if there is one. From any thread, while none is brought.
  void adopt(uint32_t layer, uint32_t expert, const std::byte* packed);
  // Fills the layer's free slots with some of these experts; their reads are under way when it returns.
  void fill(uint32_t layer, const std::vector<uint32_t>& experts);

  // Experts of one call that may be computed together; they must be at most this many.
  uint32_t most_together(uint32_t layer) const;
  // Gives these experts slots, and starts to read those that had none. What the previous bring() of the same call
  // brought keeps its slots, too: together they must be at most most_together(). One call at a time.
  void bring(uint32_t layer, std::span<const RowGroups::Group> experts, bool is_first);
  // Where the expert is, or will be once await() returns; null: it has no slot.
  const std::byte* find(uint32_t layer, uint32_t expert) const;
  bool is_read(uint32_t layer, uint32_t expert) const;
  // Waits for a read under way. After one that failed the bytes are anything.
  void await(uint32_t layer, uint32_t expert);

  // Calls `use` with an expert's bytes, which stay meanwhile; from any thread, one at a time beside those of the call.
  // False: it is not in memory.
  bool with_bytes(uint32_t layer, uint32_t expert, const std::function<void(const std::byte*)>& use);
  // Writes an expert that was packed again into its slot, if it has one. Not during a call.
  void put(uint32_t layer, uint32_t expert, const std::byte* packed);
  // Reads an expert and says whether it is whole. Throws files::ReadError.
  bool reread(uint32_t layer, uint32_t expert);

  bool is_direct() const { return file_.is_direct(); }
  uint32_t slots(uint32_t layer) const { return layers_[layer].plan.slots; }
  MemoryRange memory() const;
  bool bound() const { return !arena_ || arena_->bound(); }
  ColdCounters counters() const;

 private:
  static constexpr uint32_t kNoSlot = UINT32_MAX;

  struct Slot;
  struct Layer {
    LayerPlan plan;
    size_t stride = 0;  // bytes between slots
    std::vector<std::unique_ptr<Slot>> slots;
    std::unique_ptr<std::atomic<uint32_t>[]> slot_of;  // [experts]
    std::vector<double> values;                        // [experts]
    double increment = 1.0;
  };

  void use(Layer& layer, uint32_t expert);
  Slot& least_valuable(Layer& layer);
  void start(uint32_t layer, uint32_t expert, Slot& slot);
  std::byte* place(const Layer& layer, const Slot& slot, uint32_t expert) const;

  files::DirectFile file_;
  IsWhole is_whole_;
  Failed failed_;
  int numa_node_;
  std::mutex mutex_;  // who has which slot
  std::unique_ptr<Arena> arena_;  // the slots of all layers
  std::vector<Layer> layers_;
  uint64_t turn_ = 0, call_begin_ = 0;
  std::atomic<uint64_t> used_{0}, missed_{0}, read_bytes_{0}, waited_nanoseconds_{0};
  files::ReadThreads threads_;  // last: ends first
};

}  // namespace moebius
