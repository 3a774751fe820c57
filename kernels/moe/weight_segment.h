// Packed experts in a file that other processes map too, and that outlives the server which packed them: the one
// description of its bytes, and the server that writes it. moebius/kernels/weight_segment.py reads it; a test compares the two.
//
// One file per expert server, mode 0600, in memory (a memfd, tmpfs or hugetlbfs), or on a disk for experts that memory
// can not hold (cold_experts.h), whose data is then written and read, not mapped:
//
//   [header]       Header
//   [layers]       LayerRecord[num_layers], ascending by layer: those of which experts are held here
//   [experts]      ExpertRecord[num_experts]: of the first layer's slots, then of the second's, ...
//   [load record]  text of the server's own: the results of its load, which it needs after a restart
//   [data]         from data_offset, for each layer at a multiple of 2 MiB: [slots][expert_bytes], the bytes of
//                  panel_layout.h. Of an expert, gate and up are [0, down_offset), down and any order lie after it
//
// Writers: the one server that holds an exclusive flock(2) on the file. Readers write nothing.
// Ordering: data of an expert -> digest -> state = kPacked (R); all experts and the load record -> complete = 1 (R).
// Before content is replaced: complete = 0 -> ++generation (R) -> states and data. A reader that finds `complete` and
// the generation it knew (A) has whole data; after another generation it reads the tables again. So it is, too, when an
// expert is found damaged (complete = 0 -> ++generation (R) -> state = kMissing) and repacked (data -> state ->
// complete = 1 (R)). `checked` says that the server has compared all checksums since it opened the file.
//
// A server that finds a segment with the tables it would write itself, of the same identity, uses it as it is, or
// loads what is missing. kAbiVersion therefore grows with every change of this file's structures *and* of what
// packing makes of a weight (tests/service/test_expert_segment.py has the digests). `magic`, `abi_version` and
// `generation` stay where they are in every version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/format/panel_layout.h"
#include "kernels/moe/arena.h"

namespace moebius {

class ThreadPool;
struct EngineOptions;

namespace weights {

inline constexpr uint64_t kMagic = 0x3153544857424Dull;  // "MBWHTS1", little-endian
inline constexpr uint32_t kAbiVersion = 6;
inline constexpr size_t kIdentityText = 1024;  // bytes, the terminating NUL included
inline constexpr size_t kFormatText = 32;
inline constexpr size_t kGateUpText = 64;  // of two formats
inline constexpr size_t kBootText = 40;
inline constexpr size_t kLoadRecordBytes = size_t{512} << 10;

enum class ExpertState : uint32_t { kMissing = 0, kPacked = 1 };

struct Header {
  uint64_t magic;  // written last
  uint32_t abi_version;
  uint32_t header_bytes;
  uint64_t total_bytes;
  uint32_t num_layers;   // records of [layers]
  uint32_t num_experts;  // records of [experts]
  uint64_t layers_offset;
  uint64_t experts_offset;
  uint64_t load_record_offset;
  uint64_t data_offset;
  uint32_t hidden_size;
  uint32_t intermediate_begin;  // channels of every expert held here
  uint32_t intermediate_end;
  int32_t numa_node;            // that the memory is bound to; -1: none
  char boot_id[kBootText];      // of the system that wrote it: memory from before a reboot is not trusted
  uint64_t reserved0;
  uint64_t generation;          // atomic; grows before content is replaced; 1: the first
  uint32_t complete;            // atomic; 1: every expert is packed, and the load record written
  int32_t pid;                  // of the server, in its own pid namespace, for people
  uint64_t load_record_bytes;
  uint64_t load_record_digest;
  uint64_t experts_digest;      // of [experts], while complete
  uint32_t checked;             // atomic; 1: each expert's bytes were packed, or compared, by the server that has it now
  uint32_t reserved1;
  uint64_t reserved2[2];
  char identity[kIdentityText];  // lines "name=value", moebius/experts/slices.py
};

struct LayerRecord {
  uint64_t offset;        // of the layer's data, from the file's begin
  uint64_t expert_bytes;
  uint64_t down_offset;   // in an expert
  uint32_t layer;         // decoder layer
  uint32_t num_slots;     // experts
  uint32_t first_expert;  // record of slot 0 in [experts]
  uint32_t has_bias;
  char gate_up_format[kGateUpText];  // gate_up_formats_name
  char down_format[kFormatText];     // weight_format_name
  uint64_t reserved[3];
};

struct ExpertRecord {
  uint32_t expert;  // global id
  uint32_t state;   // ExpertState, atomic
  uint64_t digest;  // of its expert_bytes
  // What rounding cost, as PackError counts it.
  double squared_error;
  double squared_reference;
};

static_assert(sizeof(Header) == 1216 && offsetof(Header, generation) == 128 && offsetof(Header, identity) == 192);
static_assert(sizeof(LayerRecord) == 160 && sizeof(ExpertRecord) == 32);

// A digest that depends on every bit and its place; `seed` says what the bytes are of.
uint64_t digest_of(const std::byte* bytes, size_t count, uint64_t seed);

// Filled by the engine's caller.
struct SegmentOptions {
  std::string path;      // empty: no segment
  std::string identity;
  uint32_t intermediate_begin = 0;
  std::vector<std::vector<uint32_t>> held;  // [layers], global ids of the experts held here, ascending
  uint64_t slot_bytes = 0;  // 0: the data is mapped; else it stays in the file, with so much memory for some of it
};

// The file can not be used; the message names it and says why. The Python exception class is a RuntimeError.
class SegmentError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The state of the file under the path.
enum class Found { kNew, kComplete, kPartial, kReplaced };

// The writing server's mapping.
class Segment {
 public:
  // Opens or makes the file, locks it and compares what it holds; what is to be replaced stays until the first
  // prepare() or finish(). Throws std::invalid_argument for impossible options,
  // SegmentError naming the path when another server has it, when it is something else or has no room.
  Segment(const SegmentOptions& segment, const EngineOptions& engine, const std::vector<ExpertLayout>& layouts,
          const std::vector<uint32_t>& layout_index);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Found found() const { return found_; }
  const std::string& difference() const { return difference_; }  // kReplaced: what differs
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  uint64_t generation() const;
  bool complete() const;

  // Index of the layer's record; kNone: no expert of it is held.
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t record_of(uint32_t layer) const { return record_of_[layer]; }
  const LayerRecord& layer(uint32_t record) const { return layers_[record]; }
  // Returns an expert's record by global id; null: not held.
  ExpertRecord* expert(uint32_t layer, uint32_t expert) const;
  std::byte* slot(uint32_t layer, uint32_t expert) const;
  // Where the expert's bytes lie in the file.
  uint64_t offset(uint32_t layer, uint32_t expert) const;
  bool stays_in_file() const { return stays_in_file_; }
  const std::string& path() const { return path_; }
  bool is_packed(const ExpertRecord& record) const;
  MemoryRange memory(uint32_t record) const;  // of a layer, rounded up to whole pages

  // Allocates the layer's pages on the pool's threads, bound, in 2 MiB pages where the system grants them. Not
  // thread-safe. Throws SegmentError when there is not enough.
  void prepare(uint32_t record, ThreadPool& pool);
  void set_packed(ExpertRecord& record, uint64_t digest, double squared_error, double squared_reference);
  // The expert's bytes are not what was packed: it is missing from now on, and readers learn of it.
  void set_missing(ExpertRecord& record);
  // Writes bytes of an expert, also after finish(); they must not be read meanwhile.
  void write(std::byte* target, const std::byte* source, size_t count);
  // The same where the data stays in the file, from any thread. Throws SegmentError when the disk is full, or fails.
  void write_to_file(uint64_t offset, const std::byte* source, size_t count);
  // The expert's bytes are again what was packed. With the last missing one all is complete again.
  void set_repaired(ExpertRecord& record);
  // See Header::checked.
  void set_checked(bool checked);
  // Everything is packed. From here on this process can not write the data any more. Throws std::invalid_argument when
  // the text is too long or an expert is missing.
  void finish(const std::string& load_record);
  std::string load_record() const;

  bool bound() const { return bound_; }
  // Reserved 2 MiB pages; else those of tmpfs, or of a disk's file system where `in_memory` is false.
  bool hugetlb() const { return hugetlb_; }
  bool in_memory() const { return in_memory_; }

 private:
  size_t mapped_bytes() const { return stays_in_file_ ? planned_.data_offset : planned_.total_bytes; }
  void plan(const SegmentOptions& segment, const EngineOptions& engine, const std::vector<ExpertLayout>& layouts,
            const std::vector<uint32_t>& layout_index);
  void open(const std::string& path);
  std::string compare() const;  // empty: the file holds what was planned
  void map();
  void reset();
  void protect();
  bool all_packed() const;
  uint64_t experts_digest() const;
  [[noreturn]] void fail(const std::string& what, int error) const;
  [[noreturn]] void no_room() const;

  std::string path_;
  int fd_ = -1;
  void* reserved_ = nullptr;  // address space
  std::byte* base_ = nullptr;
  Header planned_{};
  std::vector<LayerRecord> layers_;
  std::vector<uint32_t> expert_ids_;  // [num_experts]
  std::vector<uint32_t> record_of_;   // [layers]
  ExpertRecord* experts_ = nullptr;
  Found found_ = Found::kNew;
  bool finished_ = false;  // the load record is written; what is missing was damaged since
  bool stays_in_file_ = false;
  bool replaces_ = false;  // what the file holds is not ours, and still there
  std::string difference_;
  bool bound_ = true;
  bool hugetlb_ = false;
  bool in_memory_ = true;
};

}  // namespace weights
}  // namespace moebius
