// A mapped mailbox segment: making, finding, checking and locking it, and its errors. No protocol here.
#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/mailbox/layout.h"

namespace moebius::mailbox {

// The names are the Python exception classes of moebius/mailbox/__init__.py.
enum class Failure {
  kMailbox,
  kAbiMismatch,
  kGeometryMismatch,
  kIdentityMismatch,
  kStaleEpoch,
  kServerLost,
  kCompute,
  kShutDown,
};

class MailboxError : public std::runtime_error {
 public:
  MailboxError(Failure failure, const std::string& message, int server_index = -1, int layer = -1)
      : std::runtime_error(message), failure(failure), server_index(server_index), layer(layer) {}

  const Failure failure;
  const int server_index;  // -1: no server is concerned
  const int layer;         // -1: no layer is concerned
};

// --- A mapped mailbox segment: making, finding, checking and locking it. No protocol here.

using Interleave = std::function<void(const char* where)>;

class Segment {
 public:
  // Makes the segment; a leftover that no process holds is replaced. Throws MailboxError when the name is
  // in use or shared memory is short, std::invalid_argument for an impossible name or geometry. Of several creators
  // of one name at most one succeeds. `interleave`, for tests of that, is called where another creator may interfere:
  // with "leftover" before a leftover is removed, with "made" before the new segment is locked.
  static Segment create(const std::string& name, const Geometry& geometry, const Interleave& interleave = {});

  // Waits up to timeout_s for a complete segment. Throws MailboxError (absent, half-made, truncated),
  // kAbiMismatch, or kGeometryMismatch when `expected` is given and differs.
  static Segment attach(const std::string& name, double timeout_s, const std::optional<Geometry>& expected);

  // Opens the segment read-only and without a lock, so that it does not count as used. Throws
  // like attach.
  static Segment observe(const std::string& name);

  // Removes the name; processes that have it mapped keep their mapping. False when there was none.
  static bool unlink(const std::string& name);

  // True when the name exists and no living process has it open.
  static bool is_stale(const std::string& name);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  const std::string& name() const { return name_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  const Geometry& geometry() const { return geometry_; }
  const Regions& regions() const { return regions_; }

  uint8_t* base() const { return base_; }
  ReadyLine& ready(uint32_t slot, uint32_t client) const;
  DoneLine& done(uint32_t slot, uint32_t server) const;
  RequestHeader& request(uint32_t slot) const;
  ResponseHeader& response(uint32_t slot, uint32_t server) const;
  ServerRecord& server(uint32_t index) const { return header().servers[index]; }
  // The epoch that every client of the slot has rung; 0 while they differ.
  uint64_t rung_epoch(uint32_t slot) const;

  // Exclusive open-file-description locks; they end with the process. False: another one holds it.
  bool try_lock(int64_t byte) const;
  void unlock(int64_t byte) const;
  bool is_locked_elsewhere(int64_t byte) const;

  // Sets the mailbox's identity to `own`, lines "name=value", where it has none yet. Returns what of it differs, in
  // words; empty: nothing. Throws std::invalid_argument when it is too long.
  std::string agree_on_identity(const std::string& own) const;
  std::string identity() const;  // empty: none yet
  // Writes a refusal or rejection; the generation last.
  void note(Refusal& refusal, uint64_t generation, const std::string& text) const;

  void check_server_index(uint32_t index) const;  // throws std::invalid_argument

 private:
  Segment(std::string name, int fd, void* base, size_t bytes, const Geometry& geometry);
  void lock_identity() const;  // waits

  std::string name_;
  int fd_ = -1;
  uint8_t* base_ = nullptr;
  size_t bytes_ = 0;
  // Copies taken after validation: a scribbled header can not move our pointers later.
  Geometry geometry_{};
  Regions regions_{};
};

// Throws std::invalid_argument naming the field, its value and what is allowed.
void check_geometry(const Geometry& geometry);
std::string describe(const Geometry& geometry);

// What of two identities, lines "name=value", differs, in words: what `found` has and what `expected` has instead.
std::string identity_difference(const std::string& expected, const std::string& found);

}  // namespace moebius::mailbox
