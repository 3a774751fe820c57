#include "kernels/mailbox/server.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "kernels/mailbox/segment.h"
#include "kernels/mailbox/signal.h"

namespace moebius::mailbox {

namespace {
constexpr size_t kMaxTraces = 1024;
}

MailboxServer::MailboxServer(const std::string& mailbox_name, uint32_t server_index, ExpertBackend& backend,
                             const ServerOptions& options)
    : segment_(Segment::attach(mailbox_name, options.attach_timeout_s, std::nullopt)),
      index_(server_index),
      backend_(backend),
      heartbeat_ns_(uint64_t(std::max(options.heartbeat_s, 0.001) * 1e9)) {
  const Geometry& g = segment_.geometry();
  segment_.check_server_index(server_index);
  if (backend.hidden_size() != g.hidden_size) {
    throw std::invalid_argument("mailbox '" + mailbox_name + "' carries hidden_size " + std::to_string(g.hidden_size) +
                                ", the expert backend has " + std::to_string(backend.hidden_size()));
  }
  const uint32_t participants = 1 + g.num_servers * std::max(options.num_threads, 1u);
  device_wait_ = device_wait(std::max(options.num_threads, 1u), g.num_servers);
  spin_ns_ = options.spin_ns >= 0 ? uint64_t(options.spin_ns) : spin_budget(participants).server_ns;
  topk_ids_.resize(size_t{g.max_rows} * g.top_k);
  topk_weights_.resize(topk_ids_.size());
  claim(options.identity);
}

MailboxServer::~MailboxServer() { stop(); }

void MailboxServer::claim(const std::string& identity) {
  ServerRecord& record = segment_.server(index_);
  if (!segment_.try_lock(kServerClaimBase + index_)) {
    throw MailboxError(Failure::kMailbox, "expert server " + std::to_string(index_) + " of mailbox '" +
                                              segment_.name() + "' is already served by process " +
                                              std::to_string(record.pid));
  }
  if (const std::string difference = identity.empty() ? "" : segment_.agree_on_identity(identity);
      !difference.empty()) {
    refuse(difference);
  }
  record.error_code = 0;
  shared(record.calls).store(0, std::memory_order_relaxed);
  shared(record.rows).store(0, std::memory_order_relaxed);
  shared(record.busy_ns).store(0, std::memory_order_relaxed);
  shared(record.sleeping).store(0, std::memory_order_relaxed);
  shared(record.pid).store(int32_t(getpid()), std::memory_order_relaxed);
  shared(record.busy_since_ns).store(0, std::memory_order_relaxed);
  beat();
  shared(record.phase).store(uint32_t(ServerPhase::kLoading), std::memory_order_release);
  // No other process takes this lock while the claim is ours; a leaving server may still have to release it.
  while (!segment_.try_lock(kServerLockBase + index_)) usleep(1000);
  generation_ = shared(record.generation).fetch_add(1, std::memory_order_acq_rel) + 1;
  claimed_ = true;
  backend_.count_progress_in(&record.progress);
}

void MailboxServer::refuse(const std::string& reason) {
  const uint64_t generation = shared(segment_.server(index_).generation).load(std::memory_order_acquire);
  segment_.note(segment_.header().refusals[index_], generation, reason);
  if (claimed_) {
    leave();
  } else {
    segment_.unlock(kServerClaimBase + index_);
  }
  throw MailboxError(Failure::kIdentityMismatch,
                     "expert server " + std::to_string(index_) + " does not fit the others of mailbox '" +
                         segment_.name() + "': " + reason,
                     int(index_));
}

bool MailboxServer::is_rejected() const {
  return shared(segment_.header().rejections[index_].generation).load(std::memory_order_acquire) == generation_;
}

void MailboxServer::note_damage() {
  shared(segment_.server(index_).damages).fetch_add(1, std::memory_order_relaxed);
}

void MailboxServer::note_problem(const std::string& reason) {
  segment_.note(segment_.header().refusals[index_], generation_, reason);
}

std::string MailboxServer::rejection() const {
  const Refusal& found = segment_.header().rejections[index_];
  return is_rejected() ? std::string(found.text, strnlen(found.text, kRefusalText)) : "";
}

void MailboxServer::start(uint64_t weights_digest) {
  if (thread_.joinable() || stop_) throw std::invalid_argument("a mailbox server starts once");
  const auto packed = shared(segment_.server(index_).weights_digest);
  const uint64_t before = packed.load(std::memory_order_relaxed);
  if (before != 0 && weights_digest != 0 && before != weights_digest) {
    refuse("the experts it has packed are not those that were served before: the checkpoint's weights have changed");
  }
  if (before == 0) packed.store(weights_digest, std::memory_order_relaxed);
  running_ = true;
  shared(segment_.server(index_).phase).store(uint32_t(ServerPhase::kReady), std::memory_order_release);
  thread_ = std::thread([this] {
    serve_loop();
    leave();
  });
}

void MailboxServer::serve_loop() {
  Header& header = segment_.header();
  while (!stop_.load(std::memory_order_acquire) && shared(header.shutdown).load(std::memory_order_seq_cst) == 0 &&
         !is_rejected()) {
    const uint32_t bell = shared(header.doorbell).load(std::memory_order_acquire);
    if (serve_oldest()) continue;
    if (draining_.load(std::memory_order_acquire)) return;
    wait_for_ring(bell);
  }
}

uint64_t MailboxServer::owed_epoch(uint32_t slot) const {
  const uint64_t rung = segment_.rung_epoch(slot);
  if (rung == 0 || rung == segment_.done(slot, index_).epoch) return 0;
  // A client that died, or is just now, writing the slot left a request that cannot be answered: skip it, the
  // next ring tells when it is whole.
  return shared(segment_.request(slot).epoch).load(std::memory_order_acquire) == rung ? rung : 0;
}

bool MailboxServer::owes_any() const {
  for (uint32_t slot = 0; slot < segment_.geometry().num_slots; ++slot) {
    if (owed_epoch(slot) != 0) return true;
  }
  return false;
}

bool MailboxServer::has_device_client() const {
  for (ClientRecord& client : segment_.header().clients) {
    if (shared(client.driver).load(std::memory_order_relaxed) == uint32_t(Driver::kDevice)) return true;
  }
  return false;
}

bool MailboxServer::serve_oldest() {
  uint64_t oldest = UINT64_MAX;
  uint32_t oldest_slot = 0;
  for (uint32_t slot = 0; slot < segment_.geometry().num_slots; ++slot) {
    const uint64_t owed = owed_epoch(slot);
    if (owed == 0 || owed >= oldest) continue;
    oldest = owed;
    oldest_slot = slot;
  }
  if (oldest == UINT64_MAX) return false;
  if (copy_request(oldest_slot, oldest)) serve(oldest_slot, oldest);
  return true;
}

bool MailboxServer::copy_request(uint32_t slot, uint64_t epoch) {
  const Geometry& g = segment_.geometry();
  const uint8_t* base = reinterpret_cast<const uint8_t*>(&segment_.request(slot));
  std::memcpy(&request_, base, sizeof(request_));
  if (request_.rows <= g.max_rows) {
    const size_t pairs = size_t{request_.rows} * g.top_k;
    std::memcpy(topk_ids_.data(), base + segment_.regions().topk_ids, pairs * 4);
    std::memcpy(topk_weights_.data(), base + segment_.regions().topk_weights, pairs * 4);
  }
  // Still the same request after the copy, or the client has moved on and rings again.
  std::atomic_thread_fence(std::memory_order_acquire);
  return shared(segment_.request(slot).epoch).load(std::memory_order_relaxed) == epoch;
}

void MailboxServer::serve(uint32_t slot, uint64_t epoch) {
  uint8_t* base = reinterpret_cast<uint8_t*>(&segment_.response(slot, index_));
  ResponseHeader& response = *reinterpret_cast<ResponseHeader*>(base);
  const uint8_t* hidden_states =
      reinterpret_cast<const uint8_t*>(&segment_.request(slot)) + segment_.regions().hidden_states;
  response.epoch = epoch;
  response.generation = generation_;
  response.layer = request_.layer;
  response.rows = request_.rows;
  response.status = uint32_t(Status::kOk);
  ServerRecord& record = segment_.server(index_);
  const uint64_t start = clock_ns();
  shared(record.busy_since_ns).store(start, std::memory_order_relaxed);
  compute(hidden_states, response, reinterpret_cast<float*>(base + segment_.regions().output));
  response.compute_ns = clock_ns() - start;
  if ((request_.trace_flags & 1u) != 0) {
    record_trace(clock_ns(CLOCK_REALTIME) - response.compute_ns, response.compute_ns);
  }

  if (response.status != uint32_t(Status::kOk)) {
    record.error_layer = response.layer;
    record.error_epoch = epoch;
    record.error_code = response.status;
    shared(segment_.header().error_word).fetch_or(1u << index_, std::memory_order_relaxed);
  }
  shared(record.calls).fetch_add(1, std::memory_order_relaxed);
  shared(record.rows).fetch_add(response.rows, std::memory_order_relaxed);
  shared(record.busy_ns).fetch_add(response.compute_ns, std::memory_order_relaxed);
  shared(record.busy_since_ns).store(0, std::memory_order_relaxed);
  beat();
  answer(slot, epoch, Status(response.status));
}

void MailboxServer::compute(const uint8_t* hidden_states, ResponseHeader& response, float* output) {
  const Geometry& g = segment_.geometry();
  try {
    if (request_.layer >= g.num_layers || request_.rows > g.max_rows) {
      throw std::invalid_argument("request names layer " + std::to_string(request_.layer) + " and " +
                                  std::to_string(request_.rows) + " rows, beyond the mailbox's geometry");
    }
    if (request_.rows == 0) return;
    backend_.forward({request_.layer, request_.rows, DType(g.dtype), hidden_states, topk_ids_.data(),
                      topk_weights_.data(), g.top_k},
                     output);
  } catch (const std::exception& error) {
    // The client gets the exception; this server lives on for the next request.
    response.status = uint32_t(Status::kComputeFailed);
    std::strncpy(response.error_text, error.what(), sizeof(response.error_text) - 1);
    response.error_text[sizeof(response.error_text) - 1] = '\0';
  }
}

void MailboxServer::answer(uint32_t slot, uint64_t epoch, Status status) {
  DoneLine& line = segment_.done(slot, index_);
  shared(line.outcome).store(outcome_of(epoch, generation_, status), std::memory_order_release);
  for (uint32_t c = 0; c < segment_.geometry().num_clients; ++c) {
    shared(line.answered[c]).store(1, std::memory_order_release);
  }
  shared(line.epoch).store(epoch, std::memory_order_seq_cst);
  if (shared(line.clients_waiting).load(std::memory_order_seq_cst) != 0) futex_wake_all(low_word(line.epoch));
}

void MailboxServer::wait_for_ring(uint32_t bell) {
  Header& header = segment_.header();
  const bool for_device = has_device_client();
  if (for_device != for_device_) {
    for_device_ = for_device;
    backend_.expect_pauses(std::chrono::nanoseconds(for_device ? device_wait_.pause_ns : 0));
  }
  const auto rung = [&] {
    return shared(header.doorbell).load(std::memory_order_acquire) != bell || stop_.load(std::memory_order_relaxed) ||
           draining_.load(std::memory_order_relaxed) || (for_device && owes_any());
  };
  const uint64_t start = clock_ns();
  const uint64_t spin_ns = for_device ? device_wait_.spin_ns : spin_ns_;
  for (uint64_t spent = 0; spent < spin_ns; spent = clock_ns() - start) {
    if (spin_for(std::min(heartbeat_ns_, spin_ns - spent), rung)) return;
    beat();
  }
  // Asleep for good after the first spin: a heartbeat is no reason to spin again.
  while (!rung() && !is_rejected() && shared(header.shutdown).load(std::memory_order_relaxed) == 0) {
    const bool expects_device = for_device && clock_ns() - start < device_wait_.idle_ns;
    sleep_on(bell, expects_device ? std::min(heartbeat_ns_, device_wait_.nap_ns) : heartbeat_ns_);
  }
}

void MailboxServer::sleep_on(uint32_t bell, uint64_t longest_ns) {
  Header& header = segment_.header();
  ServerRecord& record = segment_.server(index_);
  shared(record.sleeping).store(1, std::memory_order_seq_cst);
  if (shared(header.doorbell).load(std::memory_order_seq_cst) == bell) {
    futex_wait(&header.doorbell, bell, longest_ns);
  }
  shared(record.sleeping).store(0, std::memory_order_relaxed);
  beat();
}

void MailboxServer::beat() {
  ServerRecord& record = segment_.server(index_);
  shared(record.heartbeat_ns).store(clock_ns(), std::memory_order_relaxed);
  shared(record.progress).fetch_add(1, std::memory_order_relaxed);
}

bool MailboxServer::drain(double timeout_s) {
  if (!thread_.joinable()) return true;
  ServerRecord& record = segment_.server(index_);
  uint32_t ready = uint32_t(ServerPhase::kReady);
  shared(record.phase).compare_exchange_strong(ready, uint32_t(ServerPhase::kDraining));
  draining_ = true;
  futex_wake_all(&segment_.header().doorbell);
  const uint64_t give_up = clock_ns() + uint64_t(std::max(timeout_s, 0.0) * 1e9);
  while (is_running() && clock_ns() < give_up) usleep(500);
  if (is_running()) return false;
  stop();
  return true;
}

void MailboxServer::stop() {
  stop_ = true;
  if (!thread_.joinable()) return leave();
  shared(segment_.header().doorbell).fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&segment_.header().doorbell);
  thread_.join();
}

void MailboxServer::leave() {
  if (!claimed_.exchange(false)) return;
  backend_.count_progress_in(nullptr);
  ServerRecord& record = segment_.server(index_);
  shared(record.pid).store(0, std::memory_order_relaxed);
  shared(record.phase).store(uint32_t(ServerPhase::kAbsent), std::memory_order_release);
  segment_.unlock(kServerLockBase + index_);
  segment_.unlock(kServerClaimBase + index_);
  running_.store(false, std::memory_order_release);
}

void MailboxServer::record_trace(uint64_t start_unix_ns, uint64_t duration_ns) {
  TracedCall call{{}, request_.layer, request_.rows, start_unix_ns, duration_ns};
  std::copy(std::begin(request_.trace_id), std::end(request_.trace_id), call.trace.trace_id.begin());
  std::copy(std::begin(request_.span_id), std::end(request_.span_id), call.trace.span_id.begin());
  call.trace.flags = request_.trace_flags;
  const std::lock_guard guard(traces_mutex_);
  if (traces_.size() >= kMaxTraces) traces_.erase(traces_.begin());
  traces_.push_back(call);
}

std::vector<TracedCall> MailboxServer::take_traced_calls() {
  const std::lock_guard guard(traces_mutex_);
  return std::exchange(traces_, {});
}

}  // namespace moebius::mailbox
