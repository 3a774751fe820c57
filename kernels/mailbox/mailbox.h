// The client's side of a mailbox, driven by host code: submit a layer's rows, collect the summed answers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/mailbox/segment.h"

namespace moebius::mailbox {

// The contents of one server's record; filled by Mailbox::server_state.
struct ServerState {
  int32_t pid;             // 0 when absent
  std::string state;       // "absent", "loading", "ready", "draining", "dead" or "rejected"
  uint64_t generation;     // grows with each start of the server
  double heartbeat_age_s;  // seconds since its last sign of life; -1 when absent
  uint64_t calls;          // requests answered by this generation
  uint64_t rows;           // token rows in them
  double busy_s;           // time in its backend
  uint64_t progress;       // signs of life, also within a long request and while it loads
  double request_s;        // for how long it has been computing its request; 0: it has none
  uint64_t damages;        // experts that it or a predecessor has found damaged in memory
  std::string refusal;     // why its successor, or this generation itself, was not let in, or of a ready one, why it
                           // does not compute everything; empty: neither
};

struct TraceContext {
  std::array<uint8_t, 16> trace_id{};
  std::array<uint8_t, 8> span_id{};
  uint32_t flags = 0;  // bit 0: sampled
};

// Which of the segment's clients: one of those that share slots, of one of the groups that have slots of their own.
struct ClientId {
  uint32_t client = 0;  // 0..num_clients - 1: tensor-parallel rank
  uint32_t group = 0;   // pipeline stage
};

// A client's report of a step that it gave up; filled by Mailbox::client_report.
struct ClientReport {
  ClientFailure failure;
  uint32_t server;  // kMaxServers: none in particular
  uint32_t layer;
  uint32_t slot;
  uint64_t epoch;
};

// A problem that a device-driven client's host found with a running request; filled by Mailbox::overdue.
struct Overdue {
  uint32_t server;
  std::string reason;
};

// Several threads may use different slots at once; one slot belongs to one thread at a time.
class Mailbox {
 public:
  // spin_ns < 0 chooses from the allowed cores and 1 + num_servers participants.
  explicit Mailbox(Segment segment, int64_t spin_ns = -1, ClientId id = {});

  const Segment& segment() const { return segment_; }

  // Writes this client's rows of one request and rings every server; returns its epoch. The arrays hold all
  // `rows` rows: hidden_states [rows, H] in the mailbox's dtype, topk_ids [rows, K] int32, topk_weights
  // [rows, K] float32, contiguous, read before return. With several clients all submit the same slots, layers
  // and row counts in the same order. Throws std::invalid_argument for a bad slot, layer or row count,
  // MailboxError kShutDown, or kMailbox when another process already is this client.
  uint64_t submit(uint32_t slot, uint32_t layer, const void* hidden_states, const int32_t* topk_ids,
                  const float* topk_weights, uint32_t rows);

  // Waits for every server and writes the sum of their answers, added in server order, to this client's rows
  // of output [rows, H] float32; their content is undefined after an exception, other rows are never touched.
  // Returns each server's compute time in nanoseconds. Throws kServerLost (deadline, death or restart of a
  // server while waiting, or a peer that gave up), kStaleEpoch, kCompute (the server's own exception) or
  // kShutDown. After kServerLost the same epoch may be collected again once the server is back, or, by all
  // clients of the slot, the request submitted again.
  std::vector<uint64_t> collect(uint32_t slot, uint64_t epoch, float* output, uint64_t deadline_ms);

  // Trace context of the next submit into `slot`; without a call it is zero.
  void set_trace(uint32_t slot, const TraceContext& trace);

  ServerState server_state(uint32_t index) const;
  // ServerState::damages of all servers.
  uint64_t damages() const;

  // --- clients that share a segment, or that a device drives (client.cc) ---
  ClientId id() const { return id_; }
  // Becomes the client, or throws kMailbox when another process is it; clears what a predecessor reported. Where
  // clients share slots, set_epoch must follow with the highest epoch any of them sees, unless the segment is new.
  void claim(Driver driver);
  // Lets another process be the client from now on.
  void release();
  // The highest epoch that any client has rung or that was given out, 0: none. Stable only while all rest.
  uint64_t highest_epoch() const;
  // Sets the epoch from which further ones grow; all clients of a slot must be given the same number.
  void set_epoch(uint64_t last);
  // Client 0 only: makes what the slots hold unanswerable, so that they may be written again in any order.
  void abandon_requests(uint32_t first_slot, uint32_t num_slots) const;
  // Rings without a request, so that sleeping servers look (and spin) again.
  void wake_servers() const;
  void report_failure(const ClientReport& report) const;
  void clear_failure() const;
  // Returns the report of client `client` of this group. Throws std::invalid_argument for an index beyond the geometry.
  ClientReport client_report(uint32_t client) const;
  // Makes this client's own device give up all waits of the step: 1 + server; 0: none.
  void set_abandon(uint32_t server_plus_one) const;
  // Releases this client's stream memory operations, which wait for `answered`.
  void release_waits(uint32_t first_slot, uint32_t num_slots) const;
  // Returns the text of a server's failed answer; empty if the slot holds another answer by now.
  std::string error_text(uint32_t slot, uint32_t server, uint64_t epoch) const;
  // A server that owes this client's last ring of the slot an answer and is dead or absent. `since_ns` is when
  // the caller first saw that epoch there; past `deadline_ns` after it, any server that owes it.
  std::optional<Overdue> overdue(uint32_t slot, uint64_t since_ns, uint64_t deadline_ns) const;
  // Epoch of this client's last ring of a slot that not all servers have answered; 0: all have.
  uint64_t open_epoch(uint32_t slot) const;

  // Returns each server's generation when all are ready; throws kServerLost naming the first that is not, and why it
  // was refused if it was, or kShutDown.
  std::vector<uint64_t> wait_servers_ready(double timeout_s) const;
  // Makes `collect` accept only answers of these generations and throw kServerLost for any other; 0: any.
  void accept_generations(const std::vector<uint64_t>& generations);
  // Rejects that generation of the server: it leaves, and no client sees it as ready any more.
  void reject(uint32_t server, uint64_t generation, const std::string& reason) const;

  // Makes all processes leave, and wakes them. Permanent for this segment.
  void shut_down() const;
  bool is_shut_down() const;

 private:
  void check_slot(uint32_t slot) const;
  uint64_t next_epoch();
  void check_peers() const;
  ClientRecord& record(uint32_t client) const;
  void wait_done(uint32_t slot, uint32_t server, uint64_t epoch, uint64_t generation, uint64_t deadline_ns,
                 uint64_t deadline_ms) const;
  void check_server(uint32_t server, uint64_t generation) const;
  const ResponseHeader& checked_response(uint32_t slot, uint32_t server, uint64_t epoch) const;
  bool is_dead(uint32_t server) const;

  Segment segment_;
  uint64_t spin_ns_;
  const ClientId id_;
  bool is_client_ = false;
  uint64_t epoch_ = 0;  // last one given out, where clients share slots
  // Per slot. Row counts are remembered here: what sizes our own output is not read back from shared memory.
  struct Outstanding {
    uint64_t epoch = 0;
    uint32_t rows = 0;
  };
  std::vector<Outstanding> outstanding_;
  std::vector<TraceContext> traces_;
  std::array<uint64_t, kMaxServers> accepted_{};  // generations; 0: any
};

}  // namespace moebius::mailbox
