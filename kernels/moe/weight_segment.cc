#include "kernels/moe/weight_segment.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "kernels/moe/engine_options.h"
#include "kernels/pool/thread_pool.h"
#include "kernels/topology/files.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older headers lack it
#endif

namespace moebius::weights {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kPrepareBytes = size_t{32} << 20;  // a task of prepare()
constexpr long kTmpfsMagic = 0x01021994;            // <linux/magic.h>
constexpr long kHugetlbfsMagic = 0x958458f6;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Bytes of a layer that are given memory: small ones are not worth whole 2 MiB pages.
size_t memory_bytes(const LayerRecord& layer, bool hugetlb) {
  const size_t bytes = layer.expert_bytes * layer.num_slots;
  return round_up(bytes, hugetlb || bytes >= kHugePage / 2 ? kHugePage : kPage);
}

void copy_text(char* target, size_t capacity, const std::string& text, const char* what) {
  if (text.size() >= capacity) {
    throw std::invalid_argument(std::string("expert weights: ") + what + " has " + std::to_string(text.size()) +
                                " bytes; allowed are " + std::to_string(capacity - 1));
  }
  std::memset(target, 0, capacity);
  std::memcpy(target, text.data(), text.size());
}

std::string text_of(const char* text, size_t capacity) { return std::string(text, strnlen(text, capacity)); }

std::string boot_id() { return topology::read_file("/proc/sys/kernel/random/boot_id").value_or(""); }

// "name is found, expected wanted" for the first line in which the two identities differ.
std::string identity_difference(const std::string& found, const std::string& wanted) {
  size_t at = 0;
  while (at < found.size() && at < wanted.size() && found[at] == wanted[at]) ++at;
  const auto line = [at](const std::string& text) {
    const size_t begin = at == 0 ? 0 : text.rfind('\n', std::min(at, text.size()) - 1) + 1;
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  return "it holds other weights: " + line(found) + ", expected " + line(wanted);
}

template <typename T>
std::atomic_ref<T> atomic(T& word) {
  return std::atomic_ref<T>(word);
}

}  // namespace

// Spreads every bit of a number over all of the result's: the finaliser of MurmurHash3.
constexpr uint64_t spread_bits(uint64_t value) {
  value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCDull;
  value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53ull;
  return value ^ (value >> 33);
}

// Four chains, so that multiplications overlap: packing is much slower.
uint64_t digest_of(const std::byte* bytes, size_t count, uint64_t seed) {
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

Segment::Segment(const SegmentOptions& segment, const EngineOptions& engine, const std::vector<ExpertLayout>& layouts,
                 const std::vector<uint32_t>& layout_index)
    : path_(segment.path), stays_in_file_(segment.slot_bytes > 0) {
  plan(segment, engine, layouts, layout_index);
  try {
    open(segment.path);
    difference_ = compare();
    map();
    if (!difference_.empty()) {
      found_ = difference_ == "new" ? Found::kNew : Found::kReplaced;
      replaces_ = true;
    } else {
      found_ = complete() ? Found::kComplete : Found::kPartial;
      header().pid = getpid();
    }
    finished_ = found_ == Found::kComplete;
    if (!replaces_) set_checked(false);
    if (finished_) protect();
  } catch (...) {
    if (reserved_ != nullptr) munmap(reserved_, mapped_bytes() + kHugePage);
    if (fd_ >= 0) close(fd_);
    throw;
  }
}

Segment::~Segment() {
  munmap(reserved_, mapped_bytes() + kHugePage);
  close(fd_);  // and the lock with it
}

void Segment::plan(const SegmentOptions& segment, const EngineOptions& engine,
                   const std::vector<ExpertLayout>& layouts, const std::vector<uint32_t>& layout_index) {
  if (segment.held.size() != engine.num_layers) {
    throw std::invalid_argument("expert weights: experts held of " + std::to_string(segment.held.size()) +
                                " layers are given; there are " + std::to_string(engine.num_layers));
  }
  record_of_.assign(engine.num_layers, kNone);
  for (uint32_t layer = 0; layer < engine.num_layers; ++layer) {
    const std::vector<uint32_t>& held = segment.held[layer];
    if (held.empty()) continue;
    const ExpertLayout& layout = layouts[layout_index[layer]];
    LayerRecord record{};
    record.expert_bytes = layout.expert_bytes;
    record.down_offset = layout.down_offset;
    record.layer = layer;
    record.num_slots = static_cast<uint32_t>(held.size());
    record.first_expert = static_cast<uint32_t>(expert_ids_.size());
    record.has_bias = engine.has_bias ? 1 : 0;
    copy_text(record.gate_up_format, kGateUpText,
              gate_up_formats_name({layout.gate.format, layout.gate_up.format}), "a format's name");
    copy_text(record.down_format, kFormatText, weight_format_name(layout.down.format), "a format's name");
    for (const uint32_t expert : held) {
      const bool ascends = expert_ids_.size() == record.first_expert || expert_ids_.back() < expert;
      if (expert < engine.expert_begin || expert >= engine.expert_begin + engine.num_experts || !ascends) {
        throw std::invalid_argument("expert weights: layer " + std::to_string(layer) + " can not hold expert " +
                                    std::to_string(expert) + " in this place; allowed are ascending ids of this server");
      }
      expert_ids_.push_back(expert);
    }
    record_of_[layer] = static_cast<uint32_t>(layers_.size());
    layers_.push_back(record);
  }
  Header& header = planned_;
  header.magic = kMagic;
  header.abi_version = kAbiVersion;
  header.header_bytes = sizeof(Header);
  header.num_layers = static_cast<uint32_t>(layers_.size());
  header.num_experts = static_cast<uint32_t>(expert_ids_.size());
  header.layers_offset = kPage;
  header.experts_offset = round_up(header.layers_offset + layers_.size() * sizeof(LayerRecord), kPage);
  header.load_record_offset = round_up(header.experts_offset + expert_ids_.size() * sizeof(ExpertRecord), kPage);
  header.data_offset = round_up(header.load_record_offset + kLoadRecordBytes, kHugePage);
  header.hidden_size = engine.hidden_size;
  header.intermediate_begin = segment.intermediate_begin;
  header.intermediate_end = segment.intermediate_begin + engine.intermediate_size;
  header.numa_node = engine.numa_node;
  copy_text(header.boot_id, kBootText, boot_id(), "the system's boot id");
  copy_text(header.identity, kIdentityText, segment.identity, "the identity");
  header.total_bytes = header.data_offset;
  for (LayerRecord& layer : layers_) {
    layer.offset = header.total_bytes;
    header.total_bytes = round_up(layer.offset + layer.expert_bytes * layer.num_slots, kHugePage);
  }
}

void Segment::open(const std::string& path) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd_ < 0) fail("can not be opened", errno);
  struct stat info{};
  if (fstat(fd_, &info) != 0) fail("can not be looked at", errno);
  if (!S_ISREG(info.st_mode) || info.st_uid != geteuid()) {
    throw SegmentError("expert weights " + path_ + ": not a file of ours (owner " + std::to_string(info.st_uid) +
                             "); delete it or give another directory");
  }
  if ((info.st_mode & 0177) != 0 && fchmod(fd_, 0600) != 0) fail("can not be closed to others", errno);
  if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    throw SegmentError("expert weights " + path_ + ": another expert server uses this file; each needs its own" +
                             " (--expert-weights-dir, --split-index)");
  }
  struct statfs system{};
  if (fstatfs(fd_, &system) != 0) fail("can not be looked at", errno);
  // As unsigned 32 bits: the field is signed on some systems.
  hugetlb_ = static_cast<uint32_t>(system.f_type) == static_cast<uint32_t>(kHugetlbfsMagic);
  in_memory_ = hugetlb_ || static_cast<uint32_t>(system.f_type) == static_cast<uint32_t>(kTmpfsMagic);
}

std::string Segment::compare() const {
  struct stat info{};
  if (fstat(fd_, &info) != 0) fail("can not be looked at", errno);
  const auto bytes = static_cast<size_t>(info.st_size);
  if (bytes == 0) return "new";
  if (bytes < planned_.data_offset) return "it is truncated: " + std::to_string(bytes) + " bytes";
  // Not by read(2): hugetlbfs is mapped. The tables alone, as long as it is not known to be a segment.
  void* mapping = mmap(nullptr, planned_.data_offset, PROT_READ, MAP_SHARED, fd_, 0);
  if (mapping == MAP_FAILED) fail("can not be mapped", errno);
  const auto* base = static_cast<const std::byte*>(mapping);
  const auto& header = *static_cast<const Header*>(mapping);
  const auto differs = [&]() -> std::string {
    if (header.magic == 0) return header.generation == 0 ? "new" : "its making was broken off";
    if (header.magic != kMagic) return "no segment";
    const auto number = [](const char* name, uint64_t found, uint64_t wanted) {
      if (found == wanted) return std::string();
      return std::string(name) + " is " + std::to_string(found) + ", expected " + std::to_string(wanted);
    };
#define COMPARE(field) \
  if (std::string text = number(#field, header.field, planned_.field); !text.empty()) return text
    COMPARE(abi_version);
    COMPARE(header_bytes);
    // What stays in the file was written through to the disk before it was said to be complete.
    if (!(stays_in_file_ && header.complete != 0) && std::memcmp(header.boot_id, planned_.boot_id, kBootText) != 0) {
      return "it was written before the machine was rebooted";
    }
    const std::string found = text_of(header.identity, kIdentityText), wanted = planned_.identity;
    if (found != wanted) return identity_difference(found, wanted);
    COMPARE(hidden_size);
    COMPARE(intermediate_begin);
    COMPARE(intermediate_end);
    COMPARE(num_layers);
    COMPARE(num_experts);
    COMPARE(layers_offset);
    COMPARE(experts_offset);
    COMPARE(load_record_offset);
    COMPARE(data_offset);
    COMPARE(total_bytes);
    if (header.numa_node != planned_.numa_node) {
      return "numa_node is " + std::to_string(header.numa_node) + ", expected " + std::to_string(planned_.numa_node);
    }
#undef COMPARE
    if (bytes < header.total_bytes) return "it is truncated: " + std::to_string(bytes) + " bytes";
    const auto* layers = reinterpret_cast<const LayerRecord*>(base + header.layers_offset);
    for (uint32_t i = 0; i < header.num_layers; ++i) {
      if (std::memcmp(&layers[i], &layers_[i], sizeof(LayerRecord)) == 0) continue;
      return "layer " + std::to_string(layers_[i].layer) + " is stored differently";
    }
    const auto* experts = reinterpret_cast<const ExpertRecord*>(base + header.experts_offset);
    for (uint32_t i = 0; i < header.num_experts; ++i) {
      if (experts[i].expert != expert_ids_[i]) {
        return number("an expert's id", experts[i].expert, expert_ids_[i]);
      }
      if (header.complete != 0 && experts[i].state != static_cast<uint32_t>(ExpertState::kPacked)) {
        return "an expert is missing though it is said to be complete";
      }
    }
    const auto* record = base + header.load_record_offset;
    if (header.complete != 0 && (header.load_record_bytes > kLoadRecordBytes ||
                                 digest_of(record, header.load_record_bytes, 0) != header.load_record_digest)) {
      return "the checksum of its load record is wrong";
    }
    if (header.complete != 0 &&
        digest_of(base + header.experts_offset, header.num_experts * sizeof(ExpertRecord), 0) != header.experts_digest) {
      return "the checksum of its table of experts is wrong";
    }
    return std::string();
  }();
  munmap(mapping, planned_.data_offset);
  if (differs == "no segment") {
    throw SegmentError("expert weights " + path_ + ": the file is something else; delete it or give another" +
                             " directory");
  }
  return differs;
}

void Segment::map() {
  struct stat info{};
  if (fstat(fd_, &info) != 0) fail("can not be looked at", errno);
  // Never shrunk: another process may have mapped it, and would get SIGBUS beyond the file's end.
  const auto bytes = static_cast<size_t>(info.st_size);
  if (bytes < planned_.total_bytes && ftruncate(fd_, static_cast<off_t>(planned_.total_bytes)) != 0) no_room();
  // The address a multiple of 2 MiB, as the offsets in the file are.
  reserved_ = mmap(nullptr, mapped_bytes() + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
  if (reserved_ == MAP_FAILED) {
    reserved_ = nullptr;
    fail("no address space", errno);
  }
  base_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(reserved_), kHugePage));
  if (mmap(base_, mapped_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, 0) == MAP_FAILED) {
    no_room();
  }
  // Both are advice. A dump of the weights would delay the restart of a process that crashed.
  madvise(base_ + planned_.data_offset, mapped_bytes() - planned_.data_offset, MADV_HUGEPAGE);
  madvise(base_ + planned_.data_offset, mapped_bytes() - planned_.data_offset, MADV_DONTDUMP);
  experts_ = reinterpret_cast<ExpertRecord*>(base_ + planned_.experts_offset);
  if (!populate(base_, planned_.data_offset)) no_room();
}

// Runs when the first expert is packed: a server that is refused for another reason has changed nothing by then.
// A process that is killed here leaves a file without magic, of which only the generation is trusted.
void Segment::reset() {
  replaces_ = false;
  Header& now = header();
  struct stat info{};
  if (fstat(fd_, &info) != 0) fail("can not be looked at", errno);
  const uint64_t last = now.generation;
  atomic(now.complete).store(0, std::memory_order_release);
  atomic(now.generation).store(last + 1, std::memory_order_release);
  atomic(now.magic).store(0, std::memory_order_release);
  // Pages of what was there may lie on another node.
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(planned_.data_offset),
            std::max<off_t>(info.st_size, static_cast<off_t>(planned_.total_bytes)) -
                static_cast<off_t>(planned_.data_offset));
  Header fresh = planned_;
  fresh.magic = 0;
  fresh.generation = last + 1;
  fresh.pid = getpid();
  now = fresh;
  std::memcpy(base_ + planned_.layers_offset, layers_.data(), layers_.size() * sizeof(LayerRecord));
  for (size_t i = 0; i < expert_ids_.size(); ++i) experts_[i] = {expert_ids_[i], 0, 0, 0.0, 0.0};
  atomic(now.magic).store(kMagic, std::memory_order_release);
}

uint64_t Segment::generation() const { return atomic(header().generation).load(std::memory_order_acquire); }

bool Segment::complete() const { return atomic(header().complete).load(std::memory_order_acquire) != 0; }

bool Segment::is_packed(const ExpertRecord& record) const {
  if (replaces_) return false;
  auto& state = const_cast<uint32_t&>(record.state);
  return atomic(state).load(std::memory_order_acquire) == static_cast<uint32_t>(ExpertState::kPacked);
}

ExpertRecord* Segment::expert(uint32_t layer, uint32_t expert) const {
  if (record_of_[layer] == kNone) return nullptr;
  const LayerRecord& record = layers_[record_of_[layer]];
  const auto begin = expert_ids_.begin() + record.first_expert, end = begin + record.num_slots;
  const auto found = std::lower_bound(begin, end, expert);
  return found == end || *found != expert ? nullptr : experts_ + (found - expert_ids_.begin());
}

std::byte* Segment::slot(uint32_t layer, uint32_t expert_id) const {
  return expert(layer, expert_id) == nullptr ? nullptr : base_ + offset(layer, expert_id);
}

uint64_t Segment::offset(uint32_t layer, uint32_t expert_id) const {
  const LayerRecord& record = layers_[record_of_[layer]];
  return record.offset + (expert(layer, expert_id) - experts_ - record.first_expert) * record.expert_bytes;
}

MemoryRange Segment::memory(uint32_t record) const {
  return {base_ + layers_[record].offset, memory_bytes(layers_[record], hugetlb_)};
}

void Segment::prepare(uint32_t record, ThreadPool& pool) {
  if (replaces_) reset();
  const MemoryRange range = memory(record);
  if (stays_in_file_) {
    // Where the file system does not know it, a write that finds no room says so.
    const auto begin = static_cast<off_t>(layers_[record].offset);
    if (fallocate(fd_, FALLOC_FL_KEEP_SIZE, begin, static_cast<off_t>(range.bytes)) != 0 && errno == ENOSPC) no_room();
    return;
  }
  std::byte* const data = base_ + layers_[record].offset;
  if (planned_.numa_node >= 0 && !bind_to_node(data, range.bytes, planned_.numa_node)) bound_ = false;
  std::atomic<bool> whole{true};
  const auto tasks = static_cast<uint32_t>(round_up(range.bytes, kPrepareBytes) / kPrepareBytes);
  pool.parallel_for(tasks, [&](uint32_t task, uint32_t) {
    const size_t begin = task * kPrepareBytes, end = std::min(begin + kPrepareBytes, range.bytes);
    const size_t huge_end = hugetlb_ ? begin : begin + (end - begin) / kHugePage * kHugePage;
    // One page of each first: a 2 MiB page is made on the node of what it replaces, and without any it would ignore the
    // binding. Where the file system makes 2 MiB pages by itself, this was one, and nothing is left to be done.
    bool touched = huge_end > begin;
    for (size_t at = begin; at < huge_end && touched; at += kHugePage) touched = populate(data + at, kPage);
    // Advice: 4 KiB pages work too. All at once, because each call first waits for every CPU.
    if (touched) madvise(data + begin, huge_end - begin, MADV_COLLAPSE);
    if (!populate(data + begin, end - begin)) whole.store(false);
  });
  if (!whole.load()) no_room();
}

void Segment::set_packed(ExpertRecord& record, uint64_t digest, double squared_error, double squared_reference) {
  record.digest = digest;
  record.squared_error = squared_error;
  record.squared_reference = squared_reference;
  atomic(record.state).store(static_cast<uint32_t>(ExpertState::kPacked), std::memory_order_release);
}

void Segment::set_missing(ExpertRecord& record) {
  atomic(header().complete).store(0, std::memory_order_release);
  atomic(header().generation).fetch_add(1, std::memory_order_acq_rel);
  atomic(record.state).store(static_cast<uint32_t>(ExpertState::kMissing), std::memory_order_release);
}

void Segment::finish(const std::string& load_record) {
  if (replaces_) reset();
  if (complete()) return;
  if (load_record.size() > kLoadRecordBytes) {
    throw std::invalid_argument("expert weights: the load record has " + std::to_string(load_record.size()) +
                                " bytes; allowed are " + std::to_string(kLoadRecordBytes));
  }
  for (size_t i = 0; i < expert_ids_.size(); ++i) {
    if (is_packed(experts_[i])) continue;
    throw std::invalid_argument("expert weights: expert " + std::to_string(expert_ids_[i]) + " is not loaded");
  }
  std::byte* const target = base_ + planned_.load_record_offset;
  std::memcpy(target, load_record.data(), load_record.size());
  header().load_record_bytes = load_record.size();
  header().load_record_digest = digest_of(target, load_record.size(), 0);
  header().experts_digest = experts_digest();
  if (stays_in_file_ && fsync(fd_) != 0) fail("can not be written to the disk", errno);
  atomic(header().complete).store(1, std::memory_order_release);
  finished_ = true;
  if (stays_in_file_) {
    fdatasync(fd_);  // without it, it is packed again after a crash of the machine
    posix_fadvise(fd_, static_cast<off_t>(planned_.data_offset), 0, POSIX_FADV_DONTNEED);
  }
  protect();
}

bool Segment::all_packed() const {
  return std::all_of(experts_, experts_ + expert_ids_.size(),
                     [this](const ExpertRecord& record) { return is_packed(record); });
}

uint64_t Segment::experts_digest() const {
  return digest_of(reinterpret_cast<const std::byte*>(experts_), expert_ids_.size() * sizeof(ExpertRecord), 0);
}

void Segment::write(std::byte* target, const std::byte* source, size_t count) {
  // Whole large pages: those of hugetlbfs can not be divided.
  const size_t begin = static_cast<size_t>(target - base_) / kHugePage * kHugePage;
  const size_t end = std::min<size_t>(round_up(static_cast<size_t>(target - base_) + count, kHugePage),
                                      planned_.total_bytes);
  if (finished_ && mprotect(base_ + begin, end - begin, PROT_READ | PROT_WRITE) != 0) {
    fail("can not be written to", errno);
  }
  std::memcpy(target, source, count);
  if (finished_) mprotect(base_ + begin, end - begin, PROT_READ);
}

void Segment::write_to_file(uint64_t offset, const std::byte* source, size_t count) {
  for (size_t done = 0; done < count;) {
    const ssize_t written = pwrite(fd_, source + done, count - done, static_cast<off_t>(offset + done));
    if (written < 0 && errno != EINTR) errno == ENOSPC ? no_room() : fail("can not be written to", errno);
    done += static_cast<size_t>(std::max<ssize_t>(written, 0));
  }
  // The disk is kept at work, so that few pages are held for it; those that are written leave memory.
  sync_file_range(fd_, static_cast<off64_t>(offset), static_cast<off64_t>(count), SYNC_FILE_RANGE_WRITE);
  posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(count), POSIX_FADV_DONTNEED);
}

void Segment::set_repaired(ExpertRecord& record) {
  atomic(record.state).store(static_cast<uint32_t>(ExpertState::kPacked), std::memory_order_release);
  if (!finished_ || !all_packed()) return;
  header().experts_digest = experts_digest();
  atomic(header().complete).store(1, std::memory_order_release);
}

void Segment::set_checked(bool checked) {
  atomic(header().checked).store(checked ? 1 : 0, std::memory_order_release);
}

std::string Segment::load_record() const {
  if (replaces_ || !complete()) return "";
  return {reinterpret_cast<const char*>(base_ + planned_.load_record_offset), header().load_record_bytes};
}

// A stray write of this process ends it, instead of changing what others compute with.
void Segment::protect() {
  if (stays_in_file_) return;
  mprotect(base_ + planned_.data_offset, planned_.total_bytes - planned_.data_offset, PROT_READ);
}

void Segment::fail(const std::string& what, int error) const {
  throw SegmentError("expert weights " + path_ + " " + what + ": " + strerror(error));
}

void Segment::no_room() const {
  struct statvfs system{};
  const bool known = fstatvfs(fd_, &system) == 0;
  const auto mib = [](uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
  throw SegmentError(
      "expert weights " + path_ + ": no room for " + mib(planned_.total_bytes) +
      (hugetlb_ ? ", of reserved 2 MiB pages " + mib(free_reserved_bytes()) + " are free (vm.nr_hugepages)"
                : known && system.f_blocks > 0
                      ? "; its file system has " + mib(uint64_t{system.f_blocks} * system.f_frsize) + ", of which " +
                            mib(uint64_t{system.f_bavail} * system.f_frsize) + " are free now"
                      : "; the machine has no more memory"));
}

}  // namespace moebius::weights
