#include "kernels/mailbox/mailbox.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "kernels/mailbox/segment.h"
#include "kernels/mailbox/signal.h"
#include "kernels/mailbox/wait_policy.h"

namespace moebius::mailbox {

namespace {

// Longest sleep between two checks of a server's liveness: bounds how late its death is noticed.
constexpr uint64_t kPulseNs = 2'000'000;

void add_rows(float* output, const float* partial, size_t count, bool first) {
  if (count == 0) return;
  if (first) {
    std::memcpy(output, partial, count * sizeof(float));
    return;
  }
  for (size_t i = 0; i < count; ++i) output[i] += partial[i];
}

// Copies `count` rows from row `begin` on to the same place of an array in the request.
void copy_rows(RequestHeader& request, size_t array, const void* source, uint32_t begin, uint32_t count,
               size_t row_bytes) {
  if (count == 0) return;
  uint8_t* target = reinterpret_cast<uint8_t*>(&request) + array;
  std::memcpy(target + begin * row_bytes, static_cast<const uint8_t*>(source) + begin * row_bytes, count * row_bytes);
}

[[noreturn]] void lost(uint32_t server, const std::string& reason) {
  throw MailboxError(Failure::kServerLost, "expert server " + std::to_string(server) + " lost: " + reason,
                     int(server));
}

}  // namespace

Mailbox::Mailbox(Segment segment, int64_t spin_ns, ClientId id)
    : segment_(std::move(segment)),
      id_(id),
      outstanding_(segment_.geometry().num_slots),
      traces_(segment_.geometry().num_slots) {
  const Geometry& g = segment_.geometry();
  if (id.client >= g.num_clients || (uint64_t{id.group} + 1) * g.num_clients > kMaxRecords) {
    throw std::invalid_argument("client " + std::to_string(id.client) + " of group " + std::to_string(id.group) +
                                ": mailbox '" + segment_.name() + "' has clients 0.." +
                                std::to_string(g.num_clients - 1) + " and groups 0.." +
                                std::to_string(kMaxRecords / g.num_clients - 1));
  }
  spin_ns_ = spin_ns >= 0 ? uint64_t(spin_ns) : spin_budget(g.num_clients + g.num_servers).client_ns;
}

void Mailbox::check_slot(uint32_t slot) const {
  if (slot < segment_.geometry().num_slots) return;
  throw std::invalid_argument("slot " + std::to_string(slot) + ": mailbox '" + segment_.name() + "' has slots 0.." +
                              std::to_string(segment_.geometry().num_slots - 1));
}

uint64_t Mailbox::next_epoch() {
  if (segment_.geometry().num_clients > 1) return ++epoch_;
  return shared(segment_.header().next_epoch).fetch_add(1, std::memory_order_relaxed) + 1;
}

uint64_t Mailbox::submit(uint32_t slot, uint32_t layer, const void* hidden_states, const int32_t* topk_ids,
                         const float* topk_weights, uint32_t rows) {
  const Geometry& g = segment_.geometry();
  check_slot(slot);
  if (layer >= g.num_layers) {
    throw std::invalid_argument("layer " + std::to_string(layer) + ": allowed 0.." + std::to_string(g.num_layers - 1));
  }
  if (rows > g.max_rows) {
    throw std::invalid_argument("rows " + std::to_string(rows) + ": a mailbox slot holds at most " +
                                std::to_string(g.max_rows));
  }
  if (is_shut_down()) throw MailboxError(Failure::kShutDown, "mailbox '" + segment_.name() + "' is shut down");
  if (!is_client_) claim(Driver::kHost);

  RequestHeader& request = segment_.request(slot);
  const uint64_t epoch = next_epoch();
  if (id_.client == 0) {
    // A server may still be copying an abandoned request: the zero tells it that its copy is torn.
    shared(request.epoch).store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    request.layer = layer;
    request.rows = rows;
    const TraceContext trace = std::exchange(traces_[slot], TraceContext{});
    std::copy(trace.trace_id.begin(), trace.trace_id.end(), request.trace_id);
    std::copy(trace.span_id.begin(), trace.span_id.end(), request.span_id);
    request.trace_flags = trace.flags;
  }
  const uint32_t begin = row_begin(rows, id_.client, g.num_clients);
  const uint32_t count = row_begin(rows, id_.client + 1, g.num_clients) - begin;
  const Regions& r = segment_.regions();
  copy_rows(request, r.hidden_states, hidden_states, begin, count, g.hidden_size * element_bytes(g.dtype));
  copy_rows(request, r.topk_ids, topk_ids, begin, count, g.top_k * 4);
  copy_rows(request, r.topk_weights, topk_weights, begin, count, g.top_k * 4);
  if (id_.client == 0) shared(request.epoch).store(epoch, std::memory_order_release);
  shared(segment_.ready(slot, id_.client).epoch).store(epoch, std::memory_order_release);
  outstanding_[slot] = {epoch, rows};
  wake_servers();
  return epoch;
}

std::vector<uint64_t> Mailbox::collect(uint32_t slot, uint64_t epoch, float* output, uint64_t deadline_ms) {
  check_slot(slot);
  const uint64_t held = outstanding_[slot].epoch;
  if (held != epoch || epoch == 0) {
    throw MailboxError(Failure::kStaleEpoch, "slot " + std::to_string(slot) + " holds epoch " + std::to_string(held) +
                                                 ", collect asked for " + std::to_string(epoch));
  }
  const uint64_t deadline_ns = clock_ns() + deadline_ms * 1'000'000;
  const uint32_t num_servers = segment_.geometry().num_servers;
  std::array<uint64_t, kMaxServers> generations{};
  for (uint32_t s = 0; s < num_servers; ++s) {
    generations[s] =
        accepted_[s] != 0 ? accepted_[s] : shared(segment_.server(s).generation).load(std::memory_order_acquire);
  }
  const Geometry& g = segment_.geometry();
  const uint32_t rows = outstanding_[slot].rows;
  const size_t begin = size_t{row_begin(rows, id_.client, g.num_clients)} * g.hidden_size;
  const size_t end = size_t{row_begin(rows, id_.client + 1, g.num_clients)} * g.hidden_size;
  std::vector<uint64_t> compute_ns(num_servers);
  for (uint32_t s = 0; s < num_servers; ++s) {
    wait_done(slot, s, epoch, generations[s], deadline_ns, deadline_ms);
    const ResponseHeader& response = checked_response(slot, s, epoch);
    const uint8_t* base = reinterpret_cast<const uint8_t*>(&response);
    const float* answer = reinterpret_cast<const float*>(base + segment_.regions().output);
    add_rows(output + begin, answer + begin, end - begin, s == 0);
    compute_ns[s] = response.compute_ns;
  }
  return compute_ns;
}

void Mailbox::wait_done(uint32_t slot, uint32_t server, uint64_t epoch, uint64_t generation, uint64_t deadline_ns,
                        uint64_t deadline_ms) const {
  DoneLine& line = segment_.done(slot, server);
  const auto answered = [&] { return shared(line.epoch).load(std::memory_order_acquire) >= epoch; };
  if (spin_for(spin_ns_, answered)) return;
  for (;;) {
    const uint64_t now = clock_ns();
    shared(line.clients_waiting).fetch_or(1u << id_.client, std::memory_order_seq_cst);
    const uint64_t seen = shared(line.epoch).load(std::memory_order_seq_cst);
    if (seen < epoch && now < deadline_ns) {
      futex_wait(low_word(line.epoch), uint32_t(seen), std::min(kPulseNs, deadline_ns - now));
    }
    shared(line.clients_waiting).fetch_and(~(1u << id_.client), std::memory_order_relaxed);
    if (answered()) return;
    if (is_shut_down()) throw MailboxError(Failure::kShutDown, "mailbox '" + segment_.name() + "' is shut down");
    check_server(server, generation);
    check_peers();
    if (now >= deadline_ns) lost(server, "no answer within " + std::to_string(deadline_ms) + " ms");
  }
}

void Mailbox::check_server(uint32_t server, uint64_t generation) const {
  ServerRecord& record = segment_.server(server);
  if (is_dead(server)) lost(server, "its process " + std::to_string(record.pid) + " is gone");
  const uint64_t now_generation = shared(record.generation).load(std::memory_order_acquire);
  if (now_generation != generation) {
    lost(server, "it restarted while its answer was awaited (generation " + std::to_string(generation) + " became " +
                     std::to_string(now_generation) + ")");
  }
  if (shared(record.phase).load(std::memory_order_acquire) == uint32_t(ServerPhase::kAbsent)) {
    lost(server, "it is absent");
  }
}

const ResponseHeader& Mailbox::checked_response(uint32_t slot, uint32_t server, uint64_t epoch) const {
  const ResponseHeader& response = segment_.response(slot, server);
  if (response.epoch != epoch) {
    throw MailboxError(Failure::kStaleEpoch,
                       "expert server " + std::to_string(server) + " answered epoch " +
                           std::to_string(response.epoch) + " where " + std::to_string(epoch) + " was expected",
                       int(server));
  }
  if (accepted_[server] != 0 && response.generation != accepted_[server]) {
    lost(server, "it restarted (generation " + std::to_string(accepted_[server]) + " became " +
                     std::to_string(response.generation) + ")");
  }
  if (response.status != uint32_t(Status::kOk)) {
    shared(segment_.header().error_word).fetch_and(~(1u << server), std::memory_order_relaxed);
    char text[sizeof(response.error_text) + 1] = {};
    std::memcpy(text, response.error_text, sizeof(response.error_text));
    throw MailboxError(Failure::kCompute,
                       "expert server " + std::to_string(server) + ", layer " + std::to_string(response.layer) + ": " +
                           text,
                       int(server), int(response.layer));
  }
  return response;
}

void Mailbox::set_trace(uint32_t slot, const TraceContext& trace) {
  check_slot(slot);
  traces_[slot] = trace;
}

bool Mailbox::is_dead(uint32_t server) const {
  const uint32_t phase = shared(segment_.server(server).phase).load(std::memory_order_acquire);
  return phase != uint32_t(ServerPhase::kAbsent) && !segment_.is_locked_elsewhere(kServerLockBase + server);
}

ServerState Mailbox::server_state(uint32_t index) const {
  static constexpr const char* kNames[] = {"absent", "loading", "ready", "draining"};
  segment_.check_server_index(index);
  ServerRecord& record = segment_.server(index);
  // The lock first: what the phase says then is not a dead predecessor's.
  const bool is_alive = segment_.is_locked_elsewhere(kServerLockBase + index);
  const uint32_t phase = std::min(shared(record.phase).load(std::memory_order_acquire), 3u);
  const uint64_t beat = shared(record.heartbeat_ns).load(std::memory_order_relaxed);
  const uint64_t now = clock_ns();
  ServerState state{};
  state.pid = shared(record.pid).load(std::memory_order_relaxed);
  state.state = phase != 0 && !is_alive ? "dead" : kNames[phase];
  state.generation = shared(record.generation).load(std::memory_order_acquire);
  state.heartbeat_age_s = phase == 0 ? -1.0 : double(now > beat ? now - beat : 0) * 1e-9;
  state.calls = shared(record.calls).load(std::memory_order_relaxed);
  state.rows = shared(record.rows).load(std::memory_order_relaxed);
  state.busy_s = double(shared(record.busy_ns).load(std::memory_order_relaxed)) * 1e-9;
  state.damages = shared(record.damages).load(std::memory_order_relaxed);
  state.progress = shared(record.progress).load(std::memory_order_relaxed);
  const uint64_t since = shared(record.busy_since_ns).load(std::memory_order_relaxed);
  state.request_s = since == 0 || now < since ? 0.0 : double(now - since) * 1e-9;
  // A rejection of an earlier generation no longer applies.
  for (Refusal* found : {&segment_.header().refusals[index], &segment_.header().rejections[index]}) {
    if (shared(found->generation).load(std::memory_order_acquire) != state.generation) continue;
    if (found->text[0] != '\0') state.refusal = std::string(found->text, strnlen(found->text, kRefusalText));
  }
  const bool is_rejected =
      state.generation != 0 &&
      shared(segment_.header().rejections[index].generation).load(std::memory_order_acquire) == state.generation;
  if (is_rejected && state.state != "dead") state.state = "rejected";
  return state;
}

uint64_t Mailbox::damages() const {
  uint64_t count = 0;
  for (uint32_t s = 0; s < segment_.geometry().num_servers; ++s) {
    count += shared(segment_.server(s).damages).load(std::memory_order_relaxed);
  }
  return count;
}

std::vector<uint64_t> Mailbox::wait_servers_ready(double timeout_s) const {
  std::vector<uint64_t> generations;
  const uint64_t give_up = clock_ns() + uint64_t(std::max(timeout_s, 0.0) * 1e9);
  for (uint32_t s = 0; s < segment_.geometry().num_servers; ++s) {
    for (;;) {
      if (is_shut_down()) throw MailboxError(Failure::kShutDown, "mailbox '" + segment_.name() + "' is shut down");
      const ServerState state = server_state(s);
      if (state.state == "ready") {
        generations.push_back(state.generation);
        break;
      }
      if (clock_ns() >= give_up) {
        lost(s, "not ready in time, its state is " + state.state +
                    (state.refusal.empty() ? "" : "; a replacement was refused: " + state.refusal));
      }
      usleep(1000);
    }
  }
  return generations;
}

void Mailbox::accept_generations(const std::vector<uint64_t>& generations) {
  for (size_t s = 0; s < std::min(generations.size(), accepted_.size()); ++s) accepted_[s] = generations[s];
}

void Mailbox::reject(uint32_t server, uint64_t generation, const std::string& reason) const {
  segment_.check_server_index(server);
  segment_.note(segment_.header().rejections[server], generation, reason);
  wake_servers();
}

void Mailbox::shut_down() const {
  shared(segment_.header().shutdown).store(1, std::memory_order_seq_cst);
  shared(segment_.header().doorbell).fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&segment_.header().doorbell);
}

bool Mailbox::is_shut_down() const {
  return shared(segment_.header().shutdown).load(std::memory_order_seq_cst) != 0;
}

}  // namespace moebius::mailbox
