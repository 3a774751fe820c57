#include "kernels/mailbox/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/mailbox/signal.h"

namespace moebius::mailbox {
namespace {

void check_range(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return;
  throw std::invalid_argument(std::string("mailbox geometry: ") + field + " = " + std::to_string(value) +
                              ", allowed " + std::to_string(low) + ".." + std::to_string(high));
}

std::map<std::string, std::string> lines_by_name(const std::string& text) {
  std::map<std::string, std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) lines[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return lines;
}

}  // namespace

void check_geometry(const Geometry& g) {
  check_range("num_layers", g.num_layers, 1, 1u << 16);
  check_range("hidden_size", g.hidden_size, 1, 1u << 20);
  check_range("top_k", g.top_k, 1, 1u << 12);
  check_range("num_slots", g.num_slots, 1, kMaxSlots);
  check_range("max_rows", g.max_rows, 1, 1u << 16);
  check_range("num_servers", g.num_servers, 1, kMaxServers);
  check_range("dtype", g.dtype, 1, 3);
  check_range("num_clients", g.num_clients, 1, kMaxClients);
}

std::string identity_difference(const std::string& expected, const std::string& found) {
  auto wanted = lines_by_name(expected), brought = lines_by_name(found);
  for (const auto& [name, value] : brought) wanted.try_emplace(name);
  std::string text;
  for (const auto& [name, value] : wanted) {
    const auto other = brought.find(name);
    if (other != brought.end() && other->second == value) continue;
    const std::string has = other == brought.end() || other->second.empty() ? "none" : other->second;
    text += (text.empty() ? "" : "; ") + name + " is " + has + ", expected " + (value.empty() ? "none" : value);
  }
  return text;
}

std::string describe(const Geometry& g) {
  constexpr const char* kDtypes[] = {"float32", "bfloat16", "float16"};
  const std::string dtype = g.dtype >= 1 && g.dtype <= 3 ? kDtypes[g.dtype - 1] : std::to_string(g.dtype);
  return "layers=" + std::to_string(g.num_layers) + " hidden_size=" + std::to_string(g.hidden_size) +
         " top_k=" + std::to_string(g.top_k) + " slots=" + std::to_string(g.num_slots) +
         " rows=" + std::to_string(g.max_rows) + " servers=" + std::to_string(g.num_servers) +
         " clients=" + std::to_string(g.num_clients) + " dtype=" + dtype;
}

namespace {

std::string shm_path(const std::string& name) {
  if (name.empty() || name.size() > 200 || name.find('/') != std::string::npos || name[0] == '.') {
    throw std::invalid_argument("mailbox name '" + name +
                                "': allowed are 1..200 characters without '/' that do not start with '.'");
  }
  return "/" + name;
}

struct flock lock_of(short type, int64_t start, int64_t length) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = start;
  lock.l_len = length;
  return lock;
}

// True when some other open file description holds a lock in the range. An error counts as held: the
// safe answer is never to take over a segment or to declare a server dead by mistake.
bool held_elsewhere(int fd, int64_t start, int64_t length) {
  struct flock probe = lock_of(F_WRLCK, start, length);
  return fcntl(fd, F_OFD_GETLK, &probe) != 0 || probe.l_type != F_UNLCK;
}

// Marks the segment as used. False: another process is about to remove it.
bool hold_open(int fd) {
  struct flock shared_lock = lock_of(F_RDLCK, kOwnerLock, 1);
  return fcntl(fd, F_OFD_SETLK, &shared_lock) == 0;
}

[[noreturn]] void fail(const std::string& what, int error) {
  throw MailboxError(Failure::kMailbox, what + ": " + strerror(error));
}

// Owns the descriptor until the Segment takes it over.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  int release() { return std::exchange(fd, -1); }
};

// Returns whether the name still refers to the file, which may have been replaced since it was opened.
bool is_named(int fd) {
  struct stat info{};
  return fstat(fd, &info) == 0 && info.st_nlink > 0;
}

// Removes a segment of the name that no process holds. The write lock over all bytes is the test and the reservation in
// one: another creator, or a process that attaches meanwhile, finds it taken. Throws when the segment is in use.
void remove_leftover(const std::string& name, const std::string& path, const Interleave& interleave) {
  Descriptor file{shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0)};
  if (file.fd < 0 && errno == ENOENT) return;
  if (file.fd < 0) fail("can not open mailbox '" + name + "'", errno);
  struct flock everything = lock_of(F_WRLCK, 0, kLockEnd);
  if (fcntl(file.fd, F_OFD_SETLK, &everything) != 0) {
    throw MailboxError(Failure::kMailbox, "mailbox '" + name + "' exists and is in use by a living process");
  }
  if (interleave) interleave("leftover");
  // Removed by another creator before the lock was ours: the name is another segment's by now, or free.
  if (is_named(file.fd)) shm_unlink(path.c_str());
}

// A new segment under the name, held open by its lock.
int open_new(const std::string& name, const std::string& path, const Interleave& interleave) {
  for (;;) {
    Descriptor file{shm_open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600)};
    if (file.fd < 0 && errno == EEXIST) {
      remove_leftover(name, path, interleave);
      continue;
    }
    if (file.fd < 0) fail("can not create mailbox '" + name + "'", errno);
    if (interleave) interleave("made");
    // Until it was locked another creator may have taken it for a leftover.
    if (hold_open(file.fd) && is_named(file.fd)) return file.release();
  }
}

void fill_identity(Header& header, const Geometry& geometry, const Regions& regions) {
  header.abi_version = kAbiVersion;
  header.header_bytes = sizeof(Header);
  header.total_bytes = regions.total;
  header.geometry = geometry;
  if (getrandom(&header.creation_id, sizeof(header.creation_id), 0) < 0) header.creation_id = clock_ns();
  header.flags_offset = regions.flags;
  header.requests_offset = regions.requests;
  header.responses_offset = regions.responses;
  header.request_stride = regions.request_stride;
  header.response_stride = regions.response_stride;
}

void* map(int fd, size_t bytes, const std::string& name) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("can not map mailbox '" + name + "'", errno);
  return base;
}

// Why the segment is not complete yet, or empty when it is.
std::string incomplete_reason(int fd) {
  struct stat info{};
  if (fstat(fd, &info) != 0) return strerror(errno);
  if (info.st_size < off_t(kPage)) return "its creator has not sized it";
  uint64_t magic = 0;
  if (pread(fd, &magic, sizeof(magic), 0) != ssize_t(sizeof(magic))) return "it can not be read";
  return magic == 0 ? "its creator has not completed the header" : "";
}

Geometry validated(int fd, const std::string& name, const std::optional<Geometry>& expected) {
  Header header{};
  // A segment of another version may be shorter than this one's header.
  if (pread(fd, &header, sizeof(header), 0) < ssize_t(kPage)) fail("can not read '" + name + "'", errno);
  if (header.magic != kMagic) {
    throw MailboxError(Failure::kAbiMismatch, "shared memory '" + name + "' is not a Moebius mailbox");
  }
  if (header.abi_version != kAbiVersion || header.header_bytes != sizeof(Header)) {
    throw MailboxError(Failure::kAbiMismatch,
                       "mailbox '" + name + "': ABI version found " + std::to_string(header.abi_version) +
                           ", expected " + std::to_string(kAbiVersion));
  }
  if (expected && std::memcmp(&header.geometry, &*expected, sizeof(Geometry)) != 0) {
    throw MailboxError(Failure::kGeometryMismatch, "mailbox '" + name + "': geometry found " +
                                                       describe(header.geometry) + ", expected " +
                                                       describe(*expected));
  }
  check_geometry(header.geometry);
  struct stat info{};
  fstat(fd, &info);
  const size_t needed = regions_of(header.geometry).total;
  if (size_t(info.st_size) != needed || header.total_bytes != needed) {
    throw MailboxError(Failure::kMailbox, "mailbox '" + name + "' has " + std::to_string(info.st_size) +
                                              " bytes, its geometry needs " + std::to_string(needed));
  }
  return header.geometry;
}

}  // namespace

Segment Segment::create(const std::string& name, const Geometry& geometry, const Interleave& interleave) {
  check_geometry(geometry);
  const std::string path = shm_path(name);
  const Regions regions = regions_of(geometry);
  Descriptor file{open_new(name, path, interleave)};
  // Reserve the pages now: with a short /dev/shm a later touch would be a SIGBUS.
  if (int error = posix_fallocate(file.fd, 0, off_t(regions.total)); error != 0) {
    shm_unlink(path.c_str());
    fail("mailbox '" + name + "' needs " + std::to_string(regions.total) + " bytes of shared memory (/dev/shm)",
         error);
  }
  void* base = map(file.fd, regions.total, name);
  fill_identity(*static_cast<Header*>(base), geometry, regions);
  shared(static_cast<Header*>(base)->magic).store(kMagic, std::memory_order_release);
  return Segment(name, file.release(), base, regions.total, geometry);
}

Segment Segment::attach(const std::string& name, double timeout_s, const std::optional<Geometry>& expected) {
  const std::string path = shm_path(name);
  const uint64_t give_up = clock_ns() + uint64_t(timeout_s > 0 ? timeout_s * 1e9 : 0);
  for (;;) {
    Descriptor file{shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0)};
    if (file.fd < 0 && errno != ENOENT) fail("can not open mailbox '" + name + "'", errno);
    std::string reason = file.fd < 0 ? "there is no such shared memory" : incomplete_reason(file.fd);
    Geometry geometry{};
    if (reason.empty()) {
      geometry = validated(file.fd, name, expected);
      if (!hold_open(file.fd) || !is_named(file.fd)) reason = "it is being replaced";
    }
    if (reason.empty()) {
      const size_t bytes = regions_of(geometry).total;
      void* base = map(file.fd, bytes, name);
      return Segment(name, file.release(), base, bytes, geometry);
    }
    if (clock_ns() >= give_up) {
      throw MailboxError(Failure::kMailbox, "can not attach to mailbox '" + name + "': " + reason);
    }
    usleep(2000);
  }
}

Segment Segment::observe(const std::string& name) {
  Descriptor file{shm_open(shm_path(name).c_str(), O_RDONLY | O_CLOEXEC, 0)};
  if (file.fd < 0) fail("can not open mailbox '" + name + "'", errno);
  const std::string reason = incomplete_reason(file.fd);
  if (!reason.empty()) throw MailboxError(Failure::kMailbox, "can not read mailbox '" + name + "': " + reason);
  const Geometry geometry = validated(file.fd, name, std::nullopt);
  const size_t bytes = regions_of(geometry).total;
  void* base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.fd, 0);
  if (base == MAP_FAILED) fail("can not map mailbox '" + name + "'", errno);
  return Segment(name, file.release(), base, bytes, geometry);
}

bool Segment::unlink(const std::string& name) {
  if (shm_unlink(shm_path(name).c_str()) == 0) return true;
  if (errno == ENOENT) return false;
  fail("can not remove mailbox '" + name + "'", errno);
}

bool Segment::is_stale(const std::string& name) {
  Descriptor file{shm_open(shm_path(name).c_str(), O_RDWR | O_CLOEXEC, 0)};
  return file.fd >= 0 && !held_elsewhere(file.fd, 0, kLockEnd);
}

Segment::Segment(std::string name, int fd, void* base, size_t bytes, const Geometry& geometry)
    : name_(std::move(name)),
      fd_(fd),
      base_(static_cast<uint8_t*>(base)),
      bytes_(bytes),
      geometry_(geometry),
      regions_(regions_of(geometry)) {}

Segment::Segment(Segment&& other) noexcept
    : name_(std::move(other.name_)),
      fd_(std::exchange(other.fd_, -1)),
      base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_),
      geometry_(other.geometry_),
      regions_(other.regions_) {}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, bytes_);
  if (fd_ >= 0) close(fd_);
}

ReadyLine& Segment::ready(uint32_t slot, uint32_t client) const {
  const size_t line = size_t{slot} * geometry_.num_clients + client;
  return *reinterpret_cast<ReadyLine*>(base_ + regions_.flags + kLine * line);
}

uint64_t Segment::rung_epoch(uint32_t slot) const {
  const uint64_t epoch = shared(ready(slot, 0).epoch).load(std::memory_order_acquire);
  for (uint32_t c = 1; c < geometry_.num_clients; ++c) {
    if (shared(ready(slot, c).epoch).load(std::memory_order_acquire) != epoch) return 0;
  }
  return epoch;
}

DoneLine& Segment::done(uint32_t slot, uint32_t server) const {
  const size_t first = size_t{geometry_.num_slots} * geometry_.num_clients;
  const size_t line = first + size_t{slot} * geometry_.num_servers + server;
  return *reinterpret_cast<DoneLine*>(base_ + regions_.flags + kLine * line);
}

RequestHeader& Segment::request(uint32_t slot) const {
  return *reinterpret_cast<RequestHeader*>(base_ + regions_.requests + regions_.request_stride * slot);
}

ResponseHeader& Segment::response(uint32_t slot, uint32_t server) const {
  const size_t index = size_t{slot} * geometry_.num_servers + server;
  return *reinterpret_cast<ResponseHeader*>(base_ + regions_.responses + regions_.response_stride * index);
}

bool Segment::try_lock(int64_t byte) const {
  struct flock lock = lock_of(F_WRLCK, byte, 1);
  return fcntl(fd_, F_OFD_SETLK, &lock) == 0;
}

void Segment::unlock(int64_t byte) const {
  struct flock lock = lock_of(F_UNLCK, byte, 1);
  fcntl(fd_, F_OFD_SETLK, &lock);
}

bool Segment::is_locked_elsewhere(int64_t byte) const { return held_elsewhere(fd_, byte, 1); }

void Segment::lock_identity() const {
  struct flock lock = lock_of(F_WRLCK, kIdentityLock, 1);
  while (fcntl(fd_, F_OFD_SETLKW, &lock) != 0 && errno == EINTR) continue;
}

std::string Segment::agree_on_identity(const std::string& own) const {
  Identity& identity = header().identity;
  if (own.size() >= kIdentityText) {
    throw std::invalid_argument("the identity of an expert server has " + std::to_string(own.size()) +
                                " bytes, allowed are " + std::to_string(kIdentityText - 1));
  }
  lock_identity();
  if (identity.is_set == 0) {
    std::memcpy(identity.text, own.c_str(), own.size() + 1);
    shared(identity.is_set).store(1, std::memory_order_release);
  }
  const std::string agreed = this->identity();
  unlock(kIdentityLock);
  return agreed == own ? "" : identity_difference(agreed, own);
}

std::string Segment::identity() const {
  Identity& identity = header().identity;
  if (shared(identity.is_set).load(std::memory_order_acquire) == 0) return "";
  return std::string(identity.text, strnlen(identity.text, kIdentityText));
}

void Segment::note(Refusal& refusal, uint64_t generation, const std::string& text) const {
  lock_identity();
  std::strncpy(refusal.text, text.c_str(), kRefusalText - 1);
  refusal.text[kRefusalText - 1] = '\0';
  shared(refusal.generation).store(generation, std::memory_order_release);
  unlock(kIdentityLock);
}

void Segment::check_server_index(uint32_t index) const {
  if (index < geometry_.num_servers) return;
  throw std::invalid_argument("server index " + std::to_string(index) + ": mailbox '" + name_ + "' has servers 0.." +
                              std::to_string(geometry_.num_servers - 1));
}

}  // namespace moebius::mailbox
