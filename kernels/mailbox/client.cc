// Communication of clients with one another and their devices: claims, epochs, failures. No payload here.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/mailbox/mailbox.h"
#include "kernels/mailbox/segment.h"
#include "kernels/mailbox/signal.h"

namespace moebius::mailbox {

ClientRecord& Mailbox::record(uint32_t client) const {
  return segment_.header().clients[id_.group * segment_.geometry().num_clients + client];
}

void Mailbox::claim(Driver driver) {
  const uint32_t index = id_.group * segment_.geometry().num_clients + id_.client;
  if (!is_client_ && !segment_.try_lock(kClientLockBase + index)) {
    throw MailboxError(Failure::kMailbox, "mailbox '" + segment_.name() + "' is already driven by another client" +
                                              (index > 0 ? " " + std::to_string(index) : ""));
  }
  ClientRecord& own = record(id_.client);
  shared(own.abandon).store(0, std::memory_order_relaxed);
  shared(own.failure).store(0, std::memory_order_relaxed);
  shared(own.pid).store(int32_t(getpid()), std::memory_order_relaxed);
  shared(own.driver).store(uint32_t(driver), std::memory_order_release);
  // A predecessor may have died while it slept.
  for (uint32_t slot = 0; slot < segment_.geometry().num_slots; ++slot) {
    for (uint32_t s = 0; s < segment_.geometry().num_servers; ++s) {
      shared(segment_.done(slot, s).clients_waiting).fetch_and(~(1u << id_.client), std::memory_order_relaxed);
    }
  }
  // ... or its epochs may have come from a device, which does not keep next_epoch. Clients that share slots
  // have to agree on theirs instead: what one of them sees depends on what others have rung already.
  if (!is_client_ && segment_.geometry().num_clients == 1) set_epoch(highest_epoch());
  is_client_ = true;
  wake_servers();  // they wait otherwise for a device than for a host
}

void Mailbox::release() {
  if (!is_client_) return;
  shared(record(id_.client).driver).store(uint32_t(Driver::kHost), std::memory_order_release);
  segment_.unlock(kClientLockBase + id_.group * segment_.geometry().num_clients + id_.client);
  is_client_ = false;
}

uint64_t Mailbox::highest_epoch() const {
  uint64_t highest = std::max(epoch_, shared(segment_.header().next_epoch).load(std::memory_order_relaxed));
  for (uint32_t slot = 0; slot < segment_.geometry().num_slots; ++slot) {
    for (uint32_t c = 0; c < segment_.geometry().num_clients; ++c) {
      highest = std::max(highest, shared(segment_.ready(slot, c).epoch).load(std::memory_order_acquire));
    }
  }
  return highest;
}

void Mailbox::set_epoch(uint64_t last) {
  epoch_ = last;
  if (segment_.geometry().num_clients > 1) return;
  shared(segment_.header().next_epoch).store(last, std::memory_order_relaxed);
}

void Mailbox::abandon_requests(uint32_t first_slot, uint32_t num_slots) const {
  for (uint32_t slot = first_slot; slot < first_slot + num_slots; ++slot) {
    check_slot(slot);
    shared(segment_.request(slot).epoch).store(0, std::memory_order_relaxed);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Mailbox::wake_servers() const {
  Header& header = segment_.header();
  shared(header.doorbell).fetch_add(1, std::memory_order_seq_cst);
  bool any_sleeping = false;
  for (uint32_t s = 0; s < segment_.geometry().num_servers; ++s) {
    any_sleeping |= shared(segment_.server(s).sleeping).load(std::memory_order_seq_cst) != 0;
  }
  if (any_sleeping) futex_wake_all(&header.doorbell);
}

void Mailbox::report_failure(const ClientReport& report) const {
  ClientRecord& own = record(id_.client);
  if (shared(own.failure).load(std::memory_order_relaxed) != 0) return;  // the first one is the cause
  shared(own.failed_server).store(report.server, std::memory_order_relaxed);
  shared(own.failed_layer).store(report.layer, std::memory_order_relaxed);
  shared(own.failed_slot).store(report.slot, std::memory_order_relaxed);
  shared(own.failed_epoch).store(report.epoch, std::memory_order_relaxed);
  shared(own.failure).store(uint32_t(report.failure), std::memory_order_release);
}

void Mailbox::clear_failure() const {
  shared(record(id_.client).abandon).store(0, std::memory_order_relaxed);
  shared(record(id_.client).failure).store(0, std::memory_order_seq_cst);
}

ClientReport Mailbox::client_report(uint32_t client) const {
  if (client >= segment_.geometry().num_clients) {
    throw std::invalid_argument("client " + std::to_string(client) + ": mailbox '" + segment_.name() +
                                "' has clients 0.." + std::to_string(segment_.geometry().num_clients - 1));
  }
  ClientRecord& found = record(client);
  const uint32_t failure = shared(found.failure).load(std::memory_order_acquire);
  return {ClientFailure(std::min(failure, uint32_t(ClientFailure::kShutDown))),
          shared(found.failed_server).load(std::memory_order_relaxed),
          shared(found.failed_layer).load(std::memory_order_relaxed),
          shared(found.failed_slot).load(std::memory_order_relaxed),
          shared(found.failed_epoch).load(std::memory_order_relaxed)};
}

void Mailbox::check_peers() const {
  for (uint32_t c = 0; c < segment_.geometry().num_clients; ++c) {
    if (c == id_.client) continue;
    const ClientReport report = client_report(c);
    if (report.failure == ClientFailure::kNone) continue;
    const int server = report.server < segment_.geometry().num_servers ? int(report.server) : -1;
    throw MailboxError(Failure::kServerLost, "client " + std::to_string(c) + " of the mailbox gave up the step", server,
                       int(report.layer));
  }
}

void Mailbox::set_abandon(uint32_t server_plus_one) const {
  shared(record(id_.client).abandon).store(server_plus_one, std::memory_order_seq_cst);
}

void Mailbox::release_waits(uint32_t first_slot, uint32_t num_slots) const {
  for (uint32_t slot = first_slot; slot < first_slot + num_slots; ++slot) {
    check_slot(slot);
    for (uint32_t s = 0; s < segment_.geometry().num_servers; ++s) {
      shared(segment_.done(slot, s).answered[id_.client]).store(1, std::memory_order_release);
    }
  }
}

std::string Mailbox::error_text(uint32_t slot, uint32_t server, uint64_t epoch) const {
  check_slot(slot);
  segment_.check_server_index(server);
  const ResponseHeader& response = segment_.response(slot, server);
  if (response.epoch != epoch || response.status == uint32_t(Status::kOk)) return "";
  char text[sizeof(response.error_text) + 1] = {};
  std::memcpy(text, response.error_text, sizeof(response.error_text));
  return text;
}

uint64_t Mailbox::open_epoch(uint32_t slot) const {
  check_slot(slot);
  const uint64_t rung = shared(segment_.ready(slot, id_.client).epoch).load(std::memory_order_acquire);
  for (uint32_t s = 0; s < segment_.geometry().num_servers; ++s) {
    if (shared(segment_.done(slot, s).epoch).load(std::memory_order_acquire) != rung) return rung;
  }
  return 0;
}

std::optional<Overdue> Mailbox::overdue(uint32_t slot, uint64_t since_ns, uint64_t deadline_ns) const {
  const uint64_t epoch = open_epoch(slot);
  if (epoch == 0) return std::nullopt;
  const bool late = clock_ns() - since_ns >= deadline_ns;
  for (uint32_t s = 0; s < segment_.geometry().num_servers; ++s) {
    if (shared(segment_.done(slot, s).epoch).load(std::memory_order_acquire) == epoch) continue;
    ServerRecord& server = segment_.server(s);
    if (is_dead(s)) return Overdue{s, "its process " + std::to_string(server.pid) + " is gone"};
    if (shared(server.phase).load(std::memory_order_acquire) == uint32_t(ServerPhase::kAbsent)) {
      return Overdue{s, "it is absent"};
    }
    if (late) return Overdue{s, "no answer within " + std::to_string(deadline_ns / 1'000'000) + " ms"};
  }
  return std::nullopt;
}

}  // namespace moebius::mailbox
