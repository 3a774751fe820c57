// The one description of the mailbox's bytes: Python and the kernels of a GPU get theirs from it
// (kernels/bindings/bind_mailbox_layout.cc). A change raises kAbiVersion and the table in
// tests/kernels/test_mailbox_layout.py.
//
// One POSIX shared-memory segment per model, mode 0600, shared by every engine rank and expert server:
//
//   [header]     16384 bytes: Header
//   [flags]      64-byte lines: ReadyLine[slot][client], then DoneLine[slot][server]
//   [requests]   per slot:  RequestHeader | hidden_states dtype [max_rows, hidden_size]
//                           | topk_ids i32 [max_rows, top_k] | topk_weights f32 [max_rows, top_k]
//   [responses]  per slot and server:  ResponseHeader | output f32 [max_rows, hidden_size]
//
// Writers: the *creator* (launcher) writes the identity once. The *clients* are the engine ranks that share
// a slot (tensor-parallel ranks): client c of n writes rows [row_begin(rows, c, n), row_begin(rows, c + 1, n))
// of the slot's one payload and rings its own ReadyLine; client 0 writes the RequestHeader too. Each *server*
// writes its own ServerRecord, DoneLines and responses. No word has two concurrent writers, except those
// named atomic, which are only changed by atomic operations.
//
// Ordering of one round trip (-> is program order; R/A mark release stores and acquire loads):
//   client: request.epoch = 0 -> payload -> request.epoch = E (R) -> ready = E (R) -> ++doorbell -> wake
//   server: every client's ready == E (A) -> copy header, ids and weights -> request.epoch still E
//           -> compute -> response -> outcome = E, status (R) -> answered[client] = 1 -> done = E (R) -> wake
//   client: done == E, or outcome of E (A) -> response.epoch == E -> add own rows
// Epochs start at 1 and grow strictly over the life of the segment, slot by slot, for any clients; all
// clients of a slot number its requests alike. A server owes an answer wherever all ready lines of a slot
// agree on an epoch that is not its own done, which is all a restarted server needs to know; an answer to an
// abandoned epoch carries that epoch and so can never be taken for a newer one. Until every client has rung,
// a server waits, and can be stopped or drained.
//
// A *device-driven* client (ClientRecord.driver) is a stream of GPU work: its epochs come from a counter in
// GPU memory, so that a captured graph's replay advances them. It can not increment the doorbell or wake a
// sleeper, so servers watch the ready lines themselves and spin longer (see wait_policy.h), and the host
// rings the doorbell before each step. It skips `request.epoch = 0` while it runs: a slot is written again
// only after all its servers answered. When they did not, its host zeroes the epochs of all slots before the
// next request (`abandon_requests`), and all clients agree on a first epoch beyond everything rung.
// It waits on `outcome`, one word that says all; where stream memory operations wait instead, on `answered`,
// a constant that the client clears before it rings.
//
// Liveness is kept by the kernel, not by bytes: every client holds an open-file-description lock on byte
// kClientLockBase + its record's index of the segment, every process a shared one on kOwnerLock. The kernel drops them
// at any end of a process, also across pid namespaces. A server holds two: byte kServerClaimBase + index makes it the
// only one of its index and is taken first; byte kServerLockBase + index says that the process described by its
// ServerRecord lives. It is taken only once `phase` is this process's own, and given up after `phase` is kAbsent:
//   claim lock -> phase = kLoading (R) -> alive lock -> ++generation (R) ... phase = kAbsent (R) -> both unlocked
// So a reader that sees the alive lock taken and then reads the phase never attributes a dead predecessor's kReady
// to a successor that still loads; in between the server counts as dead.
//
// Identity: all processes that compute with a mailbox must have the same model, divided and rounded alike. The first
// server to claim an index writes `identity`; every later one compares its own and does not serve when they differ,
// with the reason in `refusals`. Packed weights are compared, too, before a server becomes ready: its
// `weights_digest` has to be that of the generations before it. A client that finds a generation to compute
// wrongly names it in `rejections`; that server leaves, and no client takes it for ready.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moebius::mailbox {

inline constexpr uint64_t kMagic = 0x31584F425345424Dull;  // "MBESBOX1", little-endian
inline constexpr uint32_t kAbiVersion = 4;
inline constexpr uint32_t kMaxServers = 16;
inline constexpr uint32_t kMaxSlots = 64;
inline constexpr uint32_t kMaxClients = 8;   // of one slot: tensor-parallel ranks
inline constexpr uint32_t kMaxRecords = 16;  // clients in all: groups (pipeline stages) times clients of a slot
inline constexpr size_t kLine = 64;
inline constexpr size_t kPage = 4096;
inline constexpr size_t kHeaderBytes = 4 * kPage;

// Byte ranges of the segment used as lock names; they hold no data of their own.
inline constexpr int64_t kOwnerLock = 0;
inline constexpr int64_t kClientLockBase = 1;
inline constexpr int64_t kIdentityLock = 32;  // exclusive while `identity` or a rejection is read and written
inline constexpr int64_t kServerLockBase = 64;
inline constexpr int64_t kServerClaimBase = 96;
inline constexpr int64_t kLockEnd = 128;
inline constexpr size_t kIdentityText = 1016;  // bytes, the terminating NUL included
inline constexpr size_t kRefusalText = 248;

enum class ServerPhase : uint32_t { kAbsent = 0, kLoading = 1, kReady = 2, kDraining = 3 };
enum class Status : uint32_t { kOk = 0, kComputeFailed = 1 };
enum class Driver : uint32_t { kHost = 0, kDevice = 1 };
// Why a client gave up a step. kAbandoned: its own host said so; kPeer: another client of the slot gave up.
enum class ClientFailure : uint32_t {
  kNone = 0,
  kDeadline = 1,
  kStaleEpoch = 2,
  kComputeFailed = 3,
  kRestarted = 4,
  kAbandoned = 5,
  kPeer = 6,
  kShutDown = 7,
};

// Owner: creator; constant once the magic is visible.
struct Geometry {
  uint32_t num_layers;   // decoder layers; requests name one in [0, num_layers)
  uint32_t hidden_size;  // H, elements of a token row
  uint32_t top_k;        // K, expert ids per row
  uint32_t num_slots;    // requests in flight at once
  uint32_t max_rows;     // token rows a slot holds
  uint32_t num_servers;  // answers summed by one collect
  uint32_t dtype;        // of hidden_states: 1 float32, 2 bfloat16, 3 float16 (numbers of DType)
  uint32_t num_clients;  // ready lines of a slot: engine ranks that each bring a part of the rows
};

// Owner: server i, except where noted. Three lines: clients read the second at each ring, and the third changes all
// the time while the server computes.
struct ServerRecord {
  uint64_t generation;    // +1 at each claim of the index; 0: never served. Release, last of a claim
  int32_t pid;            // process id in the server's own pid namespace, for people; 0: absent
  uint32_t phase;         // ServerPhase
  uint64_t heartbeat_ns;  // CLOCK_MONOTONIC, relaxed; at least every heartbeat interval while waiting
  uint64_t calls;         // requests answered by this generation
  uint64_t rows;          // token rows in them
  uint32_t error_layer;   // layer of the last failure; text in the response that carried it
  uint32_t error_code;    // Status of the last failure, 0: none in this generation
  uint64_t error_epoch;   // epoch of the last failure
  uint64_t busy_ns;       // in the backend, by this generation
  uint32_t sleeping;      // 1 while in a futex wait on the doorbell (sequentially consistent)
  uint32_t reserved1[15];
  uint64_t progress;        // atomic, relaxed: +1 for each sign of life: a look around, an expert packed, a piece of a
                            // request computed. Never reset. One that stands still for seconds belongs to a process
                            // that is frozen or stuck, however long its request is
  uint64_t busy_since_ns;   // CLOCK_MONOTONIC at which the request being computed was begun, 0: none; relaxed
  uint64_t weights_digest;  // of the experts packed by the first generation that became ready, 0: none yet; relaxed
  uint64_t damages;         // experts that any generation has found damaged in memory; relaxed, never reset. What was
                            // computed before a damage was found may be wrong
  uint64_t reserved2[4];
};

// Owner: the first server of the mailbox; under kIdentityLock.
struct Identity {
  uint32_t is_set;           // 1 once `text` is whole; release store
  uint32_t reserved;
  char text[kIdentityText];  // lines "name=value", NUL-terminated; see moebius/experts/slices.py
};

// Why a server was refused, for people and for clients that wait for it.
struct Refusal {
  uint64_t generation;      // stored last (release); of a rejection: the generation that must leave
  char text[kRefusalText];  // NUL-terminated; empty: none
};

// Owner: client, at index group * num_clients + client. What it reports to its peers and its own host.
struct ClientRecord {
  uint32_t failure;         // ClientFailure; release store after the next four. Sticky until the client recovers
  uint32_t failed_server;   // index, or kMaxServers when no server is concerned
  uint32_t failed_layer;
  uint32_t failed_slot;
  uint64_t failed_epoch;
  uint32_t driver;          // Driver
  int32_t pid;              // in the client's own pid namespace, for people; 0: never claimed
  uint32_t abandon;         // owner: the client's host. 1 + server (kMaxServers: none in particular): give up
  uint32_t reserved[7];
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

  // Line 2. Owner: launcher or clients.
  uint32_t shutdown;          // 1: all processes leave; sequentially consistent
  uint32_t reserved1[15];

  // Line 3. Owner: the client, where there is one and host code drives it.
  uint64_t next_epoch;        // last epoch given out; survives a restart of the client
  uint64_t reserved2[7];

  // Line 4. Atomic. Written by clients at each submit or step, and when a server is stopped; futex word.
  uint32_t doorbell;          // incremented after `ready`; what servers spin and sleep on
  uint32_t reserved3[15];

  // Line 5. Atomic. Bit i set by server i when it failed (fetch_or), cleared by the client that reports it.
  uint32_t error_word;
  uint32_t reserved4[15];

  uint64_t reserved5[16];     // lines 6 and 7
  ServerRecord servers[kMaxServers];
  ClientRecord clients[kMaxRecords];
  Identity identity;
  Refusal refusals[kMaxServers];    // owner: who holds the claim lock of server i; why it was refused, or why it
                                    // computes only a part of what it is asked for
  Refusal rejections[kMaxServers];  // owner: a client, under kIdentityLock
  uint8_t reserved6[kHeaderBytes - 512 - kMaxServers * (sizeof(ServerRecord) + 2 * sizeof(Refusal)) -
                    kMaxRecords * sizeof(ClientRecord) - sizeof(Identity)];
};

// Owner: the client. One line per (slot, client).
struct ReadyLine {
  uint64_t epoch;  // of the request whose rows of this client the slot holds; release store after them
  uint64_t reserved[7];
};

// Owner: server, except where noted. One line per (slot, server).
struct DoneLine {
  uint64_t epoch;                  // last epoch answered; its low 32 bits are the host clients' futex word
  uint64_t outcome;                // the same answer in one word, for a device: see outcome_of; stored before epoch
  uint32_t clients_waiting;        // atomic: bit c while client c is in a futex wait here
  uint32_t reserved0;              // 0
  uint32_t answered[kMaxClients];  // 1: server answered; 0: client c cleared it, before it rang
  uint64_t reserved1;
};

// Owner: client 0.
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
static_assert(sizeof(ServerRecord) == 3 * kLine && offsetof(ServerRecord, sleeping) == kLine);
static_assert(offsetof(ServerRecord, progress) == 2 * kLine);
static_assert(sizeof(Identity) == 16 * kLine && sizeof(Refusal) == 4 * kLine);
static_assert(sizeof(Header) == kHeaderBytes && offsetof(Header, shutdown) == 2 * kLine);
static_assert(offsetof(Header, doorbell) == 4 * kLine && offsetof(Header, servers) == 8 * kLine);
static_assert(sizeof(ReadyLine) == kLine && sizeof(DoneLine) == kLine);
static_assert(sizeof(ClientRecord) == kLine && offsetof(Header, clients) % kLine == 0);
static_assert(sizeof(RequestHeader) == kLine && sizeof(ResponseHeader) == 4 * kLine);

constexpr size_t align_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// First row of client `client`'s part of a request; that of client num_clients is the end of the last.
constexpr uint32_t row_begin(uint32_t rows, uint32_t client, uint32_t num_clients) {
  return uint32_t(uint64_t{rows} * client / num_clients);
}

// DoneLine.outcome: status in bits 0..7, generation mod 2^16 in 8..23, epoch mod 2^40 in 24..63.
constexpr uint64_t outcome_of(uint64_t epoch, uint64_t generation, Status status) {
  return epoch << 24 | (generation & 0xFFFF) << 8 | uint64_t(status);
}

// Where everything lies; a function of the geometry alone. All offsets in bytes.
struct Regions {
  size_t flags, requests, responses, total;
  size_t hidden_states, topk_ids, topk_weights;  // from a slot's RequestHeader
  size_t output;                                 // from a ResponseHeader
  size_t request_stride, response_stride;
};

// Bytes of an element of hidden states for a Geometry::dtype.
constexpr uint32_t element_bytes(uint32_t dtype) { return dtype == 1 ? 4 : 2; }

constexpr Regions regions_of(const Geometry& g) {
  const size_t element = element_bytes(g.dtype);
  const size_t rows = g.max_rows;
  Regions r{};
  r.hidden_states = sizeof(RequestHeader);
  r.topk_ids = r.hidden_states + align_up(rows * g.hidden_size * element, kLine);
  r.topk_weights = r.topk_ids + align_up(rows * g.top_k * 4, kLine);
  r.request_stride = align_up(r.topk_weights + rows * g.top_k * 4, kPage);
  r.output = sizeof(ResponseHeader);
  r.response_stride = align_up(r.output + rows * g.hidden_size * 4, kPage);
  r.flags = sizeof(Header);
  r.requests = align_up(r.flags + kLine * g.num_slots * (size_t{g.num_clients} + g.num_servers), kPage);
  r.responses = r.requests + r.request_stride * g.num_slots;
  r.total = r.responses + r.response_stride * g.num_slots * g.num_servers;
  return r;
}

}  // namespace moebius::mailbox
