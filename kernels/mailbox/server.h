// One expert server's side of a mailbox: a thread that answers the requests of the ready flags.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/mailbox/mailbox.h"
#include "kernels/mailbox/segment.h"
#include "kernels/mailbox/wait_policy.h"
#include "kernels/moe/expert_backend.h"

namespace moebius::mailbox {

struct ServerOptions {
  double attach_timeout_s = 10.0;
  double heartbeat_s = 0.1;   // longest sleep, so also the precision of heartbeat_age_s
  int64_t spin_ns = -1;       // -1: from the allowed cores and the participants
  uint32_t num_threads = 1;   // compute threads of each server, for that choice
  std::string identity{};     // lines "name=value" that all servers of the mailbox must agree on; empty: unknown
};

// A sampled request, for a tracing span; filled by the serve loop.
struct TracedCall {
  TraceContext trace;
  uint32_t layer;
  uint32_t rows;
  uint64_t start_unix_ns;
  uint64_t duration_ns;
};

class MailboxServer {
 public:
  // Attaches and claims the index (state "loading"). The backend must outlive the server. Throws
  // std::invalid_argument (index, or the backend's hidden_size differs from the mailbox's) and
  // MailboxError (see Segment::attach; kMailbox when the index is served by a living process; kIdentityMismatch
  // naming what differs, after storing it for waiting clients).
  MailboxServer(const std::string& mailbox_name, uint32_t server_index, ExpertBackend& backend,
                const ServerOptions& options);
  ~MailboxServer();  // stops

  // Starts serving (state "ready"), outstanding requests of a predecessor first. Once only. `weights_digest` of what
  // the backend has packed, 0: unknown. Throws kIdentityMismatch when a predecessor had packed something else; the
  // server has left then.
  void start(uint64_t weights_digest = 0);
  // Reports to clients that an expert was found damaged: earlier answers may be wrong. From any thread.
  void note_damage();
  // Adds to the server's state why it does not compute all that it should; empty: it does.
  void note_problem(const std::string& reason);
  // A sign of life while the backend is being filled: from any thread, between the constructor and start.
  void beat();
  // State "draining": answers until nothing is outstanding, then leaves (state "absent"). False: not
  // idle within timeout_s, and still serving.
  bool drain(double timeout_s);
  // Leaves after the request being computed, if any. Unanswered requests stay for a successor.
  void stop();

  bool is_running() const { return running_.load(std::memory_order_acquire); }
  uint64_t generation() const { return generation_; }
  // Returns why a client rejected this server; empty: none did.
  std::string rejection() const;
  // Sampled requests since the last call, at most the 1024 newest.
  std::vector<TracedCall> take_traced_calls();

 private:
  void claim(const std::string& identity);
  [[noreturn]] void refuse(const std::string& reason);
  bool is_rejected() const;
  void serve_loop();
  bool serve_oldest();
  // The epoch this server owes an answer to in the slot; 0: none, or not whole yet.
  uint64_t owed_epoch(uint32_t slot) const;
  bool owes_any() const;
  bool has_device_client() const;
  void serve(uint32_t slot, uint64_t epoch);
  bool copy_request(uint32_t slot, uint64_t epoch);
  void compute(const uint8_t* hidden_states, ResponseHeader& response, float* output);
  void answer(uint32_t slot, uint64_t epoch, Status status);
  void record_trace(uint64_t start_unix_ns, uint64_t duration_ns);
  void wait_for_ring(uint32_t bell);
  void sleep_on(uint32_t bell, uint64_t longest_ns);
  void leave();

  Segment segment_;
  const uint32_t index_;
  ExpertBackend& backend_;
  const uint64_t heartbeat_ns_;
  uint64_t spin_ns_;
  DeviceWait device_wait_;
  bool for_device_ = false;  // the last time it waited
  uint64_t generation_ = 0;
  std::thread thread_;
  std::atomic<bool> claimed_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> draining_{false};
  std::atomic<bool> running_{false};

  // The request being served, copied so that a client that gave up can not change it under the backend.
  RequestHeader request_{};
  std::vector<int32_t> topk_ids_;
  std::vector<float> topk_weights_;

  std::mutex traces_mutex_;
  std::vector<TracedCall> traces_;
};

}  // namespace moebius::mailbox
