// The one description of the mailbox's bytes. `moebius/mailbox_layout.py` mirrors it and a test compares
// every offset; change both together and raise kAbiVersion.
//
// One POSIX shared-memory segment per (engine rank, model), mode 0600:
//
//   [header]     4096 bytes: Header
//   [flags]      64-byte lines: ReadyLine[slot], then DoneLine[slot][server]
//   [requests]   per slot:  RequestHeader | hidden_states dtype [max_rows, hidden_size]
//                           | topk_ids i32 [max_rows, top_k] | topk_weights f32 [max_rows, top_k]
//   [responses]  per slot and server:  ResponseHeader | output f32 [max_rows, hidden_size]
//
// Writers: the *creator* (launcher) writes the identity once; the one *client* (engine rank) writes
// requests and rings; each *server* writes its own ServerRecord, DoneLines and responses. No word has two
// concurrent writers, except the doorbell, which is only ever incremented atomically.
//
// Ordering of one round trip (-> is program order; R/A mark release stores and acquire loads):
//   client: request.epoch = 0 -> payload -> request.epoch = E (R) -> ready = E (R) -> ++doorbell -> wake
//   server: ready == E (A) -> copy header, ids and weights -> request.epoch still E -> compute
//           -> response -> done = E (R) -> wake
//   client: done == E (A) -> response.epoch == E -> add
// Epochs start at 1 and grow strictly over the life of the segment, whoever the client is. A server owes
// an answer wherever ready != its own done, which is all a restarted server needs to know; an answer to
// an abandoned epoch carries that epoch and so can never be taken for a newer one.
//
// Liveness is kept by the kernel, not by bytes: every server holds an open-file-description lock on byte
// kServerLockBase + index of the segment, every client one on kClientLock, everybody a shared one on
// kOwnerLock. The kernel drops them however a process ends, also across pid namespaces.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moebius::mailbox {

inline constexpr uint64_t kMagic = 0x31584F425345424Dull;  // "MBESBOX1", little-endian
inline constexpr uint32_t kAbiVersion = 1;
inline constexpr uint32_t kMaxServers = 16;
inline constexpr uint32_t kMaxSlots = 64;
inline constexpr size_t kLine = 64;
inline constexpr size_t kPage = 4096;

// Byte ranges of the segment used as lock names; they hold no data of their own.
inline constexpr int64_t kOwnerLock = 0;
inline constexpr int64_t kClientLock = 1;
inline constexpr int64_t kServerLockBase = 64;

enum class ServerPhase : uint32_t { kAbsent = 0, kLoading = 1, kReady = 2, kDraining = 3 };
enum class Status : uint32_t { kOk = 0, kComputeFailed = 1 };

// Owner: creator; constant once the magic is visible.
struct Geometry {
  uint32_t num_layers;   // decoder layers; requests name one in [0, num_layers)
  uint32_t hidden_size;  // H, elements of a token row
  uint32_t top_k;        // K, expert ids per row
  uint32_t num_slots;    // requests in flight at once
  uint32_t max_rows;     // token rows a slot holds
  uint32_t num_servers;  // answers summed by one collect
  uint32_t dtype;        // of hidden_states: 1 float32, 2 bfloat16 (numbers of DType)
  uint32_t reserved;     // 0
};

// Owner: server i, except where noted. Two lines, so that a heartbeat does not disturb a neighbour.
struct ServerRecord {
  uint64_t generation;    // +1 at each claim of the index; 0: never served. Release store, last of a claim
  int32_t pid;            // process id in the server's own pid namespace, for people; 0: absent
  uint32_t phase;         // ServerPhase
  uint64_t heartbeat_ns;  // CLOCK_MONOTONIC, relaxed; at least every heartbeat interval while waiting
  uint64_t calls;         // requests answered by this generation
  uint64_t rows;          // token rows in them
  uint32_t error_layer;   // layer of the last failure; text in the response that carried it
  uint32_t error_code;    // Status of the last failure, 0: none in this generation
  uint64_t error_epoch;   // epoch of the last failure
  uint64_t reserved0;     // 0
  uint32_t sleeping;      // 1 while in a futex wait on the doorbell (sequentially consistent)
  uint32_t reserved1[15];
};

struct Header {
  // Line 0 and 1. Owner: creator; constant after `magic`, which is stored last (release).
  uint64_t magic;             // kMagic; 0 while the segment is being made
  uint32_t abi_version;       // kAbiVersion
  uint32_t header_bytes;      // sizeof(Header)
  uint64_t total_bytes;       // size of the segment
  Geometry geometry;          // see above
  uint64_t creation_id;       // random; tells two segments of one name apart
  uint64_t flags_offset;      // bytes from the segment's start, as are the next two
  uint64_t requests_offset;
  uint64_t responses_offset;
  uint64_t request_stride;    // bytes from slot to slot
  uint64_t response_stride;   // bytes from (slot, server) to the next server
  uint64_t reserved0[3];

  // Line 2. Owner: launcher or client.
  uint32_t shutdown;          // 1: everybody leaves; sequentially consistent
  uint32_t reserved1[15];

  // Line 3. Owner: client.
  uint64_t next_epoch;        // last epoch given out; survives a restart of the client
  uint64_t reserved2[7];

  // Line 4. Written by the client at each submit, and by whoever stops a server; futex word.
  uint32_t doorbell;          // incremented after `ready`; what servers spin and sleep on
  uint32_t reserved3[15];

  // Line 5. Bit i set by server i when it failed (fetch_or), cleared by the client that reports it.
  uint32_t error_word;
  uint32_t reserved4[15];

  uint64_t reserved5[16];     // lines 6 and 7
  ServerRecord servers[kMaxServers];
  uint8_t reserved6[kPage - 512 - kMaxServers * sizeof(ServerRecord)];
};

// Owner: client. One line per slot.
struct ReadyLine {
  uint64_t epoch;  // of the request the slot holds; release store after the payload
  uint64_t reserved[7];
};

// Owner: server, except client_waiting. One line per (slot, server).
struct DoneLine {
  uint64_t epoch;           // last epoch answered; its low 32 bits are the client's futex word
  uint32_t client_waiting;  // owner: client; 1 while in a futex wait here (sequentially consistent)
  uint32_t reserved[13];
};

// Owner: client.
struct RequestHeader {
  uint64_t epoch;        // 0 while the payload changes, so that a late server can tell
  uint32_t layer;
  uint32_t rows;         // 0..max_rows
  uint8_t trace_id[16];  // W3C trace context; zero unless sampled
  uint8_t span_id[8];    // parent span
  uint32_t trace_flags;  // bit 0: sampled
  uint32_t reserved[5];
};

// Owner: server.
struct ResponseHeader {
  uint64_t epoch;       // echoes the request's
  uint64_t compute_ns;  // time in the backend, nanoseconds
  uint64_t generation;  // of the server that answered
  uint32_t status;      // Status
  uint32_t layer;
  uint32_t rows;
  uint32_t reserved[7];
  char error_text[192];  // NUL-terminated; meaningful when status != kOk
};

static_assert(sizeof(Geometry) == 32);
static_assert(sizeof(ServerRecord) == 2 * kLine && offsetof(ServerRecord, sleeping) == kLine);
static_assert(sizeof(Header) == kPage && offsetof(Header, shutdown) == 2 * kLine);
static_assert(offsetof(Header, doorbell) == 4 * kLine && offsetof(Header, servers) == 8 * kLine);
static_assert(sizeof(ReadyLine) == kLine && sizeof(DoneLine) == kLine);
static_assert(sizeof(RequestHeader) == kLine && sizeof(ResponseHeader) == 4 * kLine);

constexpr size_t align_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Where everything lies; a function of the geometry alone. All offsets in bytes.
struct Regions {
  size_t flags, requests, responses, total;
  size_t hidden_states, topk_ids, topk_weights;  // from a slot's RequestHeader
  size_t output;                                 // from a ResponseHeader
  size_t request_stride, response_stride;
};

constexpr Regions regions_of(const Geometry& g) {
  const size_t element = g.dtype == 2 ? 2 : 4;
  const size_t rows = g.max_rows;
  Regions r{};
  r.hidden_states = sizeof(RequestHeader);
  r.topk_ids = r.hidden_states + align_up(rows * g.hidden_size * element, kLine);
  r.topk_weights = r.topk_ids + align_up(rows * g.top_k * 4, kLine);
  r.request_stride = align_up(r.topk_weights + rows * g.top_k * 4, kPage);
  r.output = sizeof(ResponseHeader);
  r.response_stride = align_up(r.output + rows * g.hidden_size * 4, kPage);
  r.flags = sizeof(Header);
  r.requests = align_up(r.flags + kLine * g.num_slots * (size_t{1} + g.num_servers), kPage);
  r.responses = r.requests + r.request_stride * g.num_slots;
  r.total = r.responses + r.response_stride * g.num_slots * g.num_servers;
  return r;
}

}  // namespace moebius::mailbox
