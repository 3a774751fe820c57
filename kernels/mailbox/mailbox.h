// The client's side of a mailbox, driven by host code: submit a layer's rows, collect the summed answers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/mailbox/segment.h"

namespace moebius::mailbox {

// What one server's record says; filled by Mailbox::server_state.
struct ServerState {
  int32_t pid;             // 0 when absent
  std::string state;       // "absent", "loading", "ready", "draining" or "dead"
  uint64_t generation;     // grows with each start of the server
  double heartbeat_age_s;  // seconds since its last sign of life; -1 when absent
  uint64_t calls;          // requests answered by this generation
  uint64_t rows;           // token rows in them
};

struct TraceContext {
  std::array<uint8_t, 16> trace_id{};
  std::array<uint8_t, 8> span_id{};
  uint32_t flags = 0;  // bit 0: sampled
};

// Several threads may use different slots at once; one slot belongs to one thread at a time.
class Mailbox {
 public:
  // spin_ns < 0 chooses from the allowed cores and 1 + num_servers participants.
  explicit Mailbox(Segment segment, int64_t spin_ns = -1);

  const Segment& segment() const { return segment_; }

  // Writes one request and rings every server; returns its epoch. hidden_states [rows, H] in the mailbox's
  // dtype, topk_ids [rows, K] int32, topk_weights [rows, K] float32, all contiguous and read before return.
  // Throws std::invalid_argument for a bad slot, layer or row count, MailboxError kShutDown, or kMailbox
  // when another process already drives this mailbox.
  uint64_t submit(uint32_t slot, uint32_t layer, const void* hidden_states, const int32_t* topk_ids,
                  const float* topk_weights, uint32_t rows);

  // Waits for every server and writes the sum of their answers, added in server order, to output
  // [rows, H] float32; its content is undefined after an exception. Returns each server's compute time in
  // nanoseconds. Throws kServerLost (deadline, death or restart of a server while waiting), kStaleEpoch,
  // kCompute (the server's own exception) or kShutDown. After kServerLost the same epoch may be collected
  // again once the server is back, or the request submitted anew.
  std::vector<uint64_t> collect(uint32_t slot, uint64_t epoch, float* output, uint64_t deadline_ms);

  // Trace context of the next submit into `slot`; without a call it is zero.
  void set_trace(uint32_t slot, const TraceContext& trace);

  ServerState server_state(uint32_t index) const;

  // Returns when every server is ready; throws kServerLost naming the first that is not, or kShutDown.
  void wait_servers_ready(double timeout_s) const;

  // Tells everybody to leave and wakes them. Permanent for this segment.
  void shut_down() const;
  bool is_shut_down() const;

 private:
  void check_slot(uint32_t slot) const;
  void claim_client();
  void ring() const;
  void wait_done(uint32_t slot, uint32_t server, uint64_t epoch, uint64_t generation, uint64_t deadline_ns,
                 uint64_t deadline_ms) const;
  void check_server(uint32_t server, uint64_t generation) const;
  const ResponseHeader& checked_response(uint32_t slot, uint32_t server, uint64_t epoch) const;
  bool is_dead(uint32_t server) const;

  Segment segment_;
  uint64_t spin_ns_;
  bool is_client_ = false;
  // Per slot. Row counts are remembered here: what sizes our own output is not read back from shared memory.
  struct Outstanding {
    uint64_t epoch = 0;
    uint32_t rows = 0;
  };
  std::vector<Outstanding> outstanding_;
  std::vector<TraceContext> traces_;
};

}  // namespace moebius::mailbox
