#include "kernels/testing/mailbox_stress.h"

#include <bit>
#include <exception>
#include <random>
#include <vector>

#include "kernels/mailbox/segment.h"
#include "kernels/mailbox/signal.h"

namespace moebius::mailbox {
namespace {

// One round's input and the answer it must get.
struct Round {
  uint32_t layer = 0;
  uint32_t rows = 0;
  std::vector<float> hidden_states;
  std::vector<uint16_t> hidden_bits;  // the same values as bfloat16
  std::vector<int32_t> topk_ids;
  std::vector<float> topk_weights;
  std::vector<float> output;

  explicit Round(const Geometry& g)
      : hidden_states(size_t{g.max_rows} * g.hidden_size),
        hidden_bits(hidden_states.size()),
        topk_ids(size_t{g.max_rows} * g.top_k),
        topk_weights(topk_ids.size()),
        output(hidden_states.size()) {}

  void draw(const Geometry& g, std::mt19937_64& random) {
    const uint64_t kind = random() % 8;
    rows = kind == 0 ? 0 : kind == 1 ? g.max_rows : kind < 5 ? 1 : uint32_t(random() % (g.max_rows + 1));
    layer = uint32_t(random() % g.num_layers);
    for (size_t i = 0; i < size_t{rows} * g.hidden_size; ++i) {
      hidden_states[i] = float(int64_t(random() % 129) - 64);
      hidden_bits[i] = uint16_t(std::bit_cast<uint32_t>(hidden_states[i]) >> 16);
    }
    for (size_t i = 0; i < size_t{rows} * g.top_k; ++i) {
      topk_ids[i] = int32_t(random() % 33) - 1;
      topk_weights[i] = float(random() % 5) * 0.25f;
    }
    std::fill(output.begin(), output.end(), -1e30f);
  }

  const void* payload(const Geometry& g) const {
    return g.dtype == 2 ? static_cast<const void*>(hidden_bits.data()) : hidden_states.data();
  }

  // Checks the client's own rows.
  bool answered_rightly(const Geometry& g, uint32_t client, float scale_sum) const {
    const uint32_t end = row_begin(rows, client + 1, g.num_clients);
    for (uint32_t row = row_begin(rows, client, g.num_clients); row < end; ++row) {
      float routed = 0;
      for (uint32_t k = 0; k < g.top_k; ++k) {
        routed += topk_weights[size_t{row} * g.top_k + k] * float(topk_ids[size_t{row} * g.top_k + k] + 1);
      }
      routed *= float(layer + 1) * float(g.num_servers);
      for (size_t i = size_t{row} * g.hidden_size; i < size_t{row + 1} * g.hidden_size; ++i) {
        if (output[i] != scale_sum * hidden_states[i] + routed) return false;
      }
    }
    return true;
  }
};

uint64_t submit(Mailbox& mailbox, uint32_t slot, const Round& round) {
  return mailbox.submit(slot, round.layer, round.payload(mailbox.segment().geometry()), round.topk_ids.data(),
                        round.topk_weights.data(), round.rows);
}

bool any_gave_up(const Mailbox& mailbox) {
  for (uint32_t c = 0; c < mailbox.segment().geometry().num_clients; ++c) {
    if (mailbox.client_report(c).failure != ClientFailure::kNone) return true;
  }
  return false;
}

// Sees one request through to its answer, whatever dies on the way.
void see_through(Mailbox& mailbox, uint32_t slot, Round& round, const StressOptions& options, std::mt19937_64& random,
                 StressResult& result) {
  uint64_t epoch = submit(mailbox, slot, round);
  for (;;) {
    try {
      mailbox.collect(slot, epoch, round.output.data(), options.deadline_ms);
      return;
    } catch (const MailboxError& error) {
      if (error.failure == Failure::kStaleEpoch) ++result.stale;
      if (error.failure != Failure::kServerLost || any_gave_up(mailbox)) {
        // Those who share the slots must not wait for this client for ever.
        mailbox.report_failure({ClientFailure::kAbandoned, kMaxServers, round.layer, slot, epoch});
        throw;
      }
    }
    ++result.lost;
    // Both recoveries are legal: submit again at once, with the old answer still arriving, or the same epoch. Clients
    // that share slots would have to agree on the first; the draw must not make their inputs differ.
    const bool resubmits = mailbox.segment().geometry().num_clients == 1 && random() % 2 == 0;
    if (resubmits) {
      epoch = submit(mailbox, slot, round);
      ++result.resubmitted;
    }
    mailbox.wait_servers_ready(options.recovery_s);
  }
}

}  // namespace

StressResult stress(Mailbox& mailbox, const StressOptions& options) {
  const Geometry& g = mailbox.segment().geometry();
  std::mt19937_64 random(options.seed);
  Round round(g);
  StressResult result;
  mailbox.wait_servers_ready(options.recovery_s);
  for (uint64_t i = 0; i < options.rounds; ++i) {
    round.draw(g, random);
    see_through(mailbox, uint32_t(i % g.num_slots), round, options, random, result);
    ++result.answered;
    if (!round.answered_rightly(g, mailbox.id().client, options.scale_sum)) ++result.wrong;
  }
  return result;
}

std::vector<double> measure_round_trips(Mailbox& mailbox, uint32_t rows, uint32_t rounds, uint32_t warmup,
                                        uint64_t deadline_ms) {
  const Geometry& g = mailbox.segment().geometry();
  Round round(g);
  round.rows = rows;
  std::vector<double> microseconds;
  microseconds.reserve(rounds);
  for (uint32_t i = 0; i < warmup + rounds; ++i) {
    const uint64_t start = clock_ns();
    const uint64_t epoch = submit(mailbox, i % g.num_slots, round);
    mailbox.collect(i % g.num_slots, epoch, round.output.data(), deadline_ms);
    if (i >= warmup) microseconds.push_back(double(clock_ns() - start) * 1e-3);
  }
  return microseconds;
}

std::vector<double> ping_pong(uint32_t* lines, bool asks, uint32_t rounds, uint64_t spin_ns) {
  uint32_t* const word = lines;
  uint32_t& i_sleep = lines[asks ? 16 : 32];
  uint32_t& other_sleeps = lines[asks ? 32 : 16];
  std::vector<double> microseconds;
  const auto wait_for = [&](uint32_t value) {
    const auto arrived = [&] { return shared(*word).load(std::memory_order_seq_cst) == value; };
    if (spin_for(spin_ns, arrived)) return;
    // The other side's process may have ended: look again now and then instead of sleeping for ever.
    const uint64_t give_up = clock_ns() + 20'000'000'000u;
    shared(i_sleep).store(1, std::memory_order_seq_cst);
    while (!arrived()) {
      futex_wait(word, value - 1, 10'000'000);
      if (clock_ns() > give_up) throw MailboxError(Failure::kMailbox, "ping-pong: the other side is gone");
    }
    shared(i_sleep).store(0, std::memory_order_relaxed);
  };
  const auto tell = [&](uint32_t value) {
    shared(*word).store(value, std::memory_order_seq_cst);
    if (shared(other_sleeps).load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
  };
  for (uint32_t i = 0; i < rounds; ++i) {
    const uint64_t start = clock_ns();
    if (asks) tell(2 * i + 1);
    wait_for(asks ? 2 * i + 2 : 2 * i + 1);
    if (!asks) tell(2 * i + 2);
    if (asks) microseconds.push_back(double(clock_ns() - start) * 1e-3);
  }
  return microseconds;
}

void submit_on_host(void* argument) {
  HostCall& call = *static_cast<HostCall*>(argument);
  try {
    call.epoch = call.mailbox->submit(call.slot, call.layer, call.hidden_states, call.topk_ids, call.topk_weights,
                                      call.rows);
  } catch (const std::exception&) {
    ++call.failures;
  }
}

void collect_on_host(void* argument) {
  HostCall& call = *static_cast<HostCall*>(argument);
  try {
    call.mailbox->collect(call.slot, call.epoch, call.output, call.deadline_ms);
  } catch (const std::exception&) {
    ++call.failures;
  }
}

}  // namespace moebius::mailbox
