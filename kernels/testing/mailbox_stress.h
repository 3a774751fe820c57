// Clients that drive a mailbox as fast as they can: one that checks every answer while others kill its servers, those
// that the bench measures, and one that a CUDA stream calls.
#pragma once

#include <cstdint>

#include "kernels/mailbox/mailbox.h"

namespace moebius::mailbox {

struct StressOptions {
  uint64_t rounds;
  uint64_t seed = 0;
  float scale_sum = 1.0f;       // sum of the servers' EchoOptions::scale
  uint64_t deadline_ms = 5000;  // of one collect
  double recovery_s = 30.0;     // longest wait for a killed server's successor
};

struct StressResult {
  uint64_t answered = 0;    // rounds whose answer was collected and compared
  uint64_t wrong = 0;       // of those, answers that were not the function of their own input
  uint64_t lost = 0;        // kServerLost seen
  uint64_t resubmitted = 0; // lost requests submitted again; the others were collected again under their epoch
  uint64_t stale = 0;       // kStaleEpoch seen; a correct protocol gives none
};

// Every mailbox of one process may run it; uses the slots in turn, with rows of 0, 1, max and between.
StressResult stress(Mailbox& mailbox, const StressOptions& options);

// Microseconds of each of `rounds` round trips of `rows` rows in slot 0, after `warmup` unmeasured ones.
std::vector<double> measure_round_trips(Mailbox& mailbox, uint32_t rows, uint32_t rounds, uint32_t warmup,
                                        uint64_t deadline_ms);

// The limit to compare with: one side of a ping-pong on a shared cache line between two processes, waiting
// as the mailbox does (spin, then futex, waking only who sleeps). `lines` is 192 bytes of zeroed shared
// memory, 64-byte aligned. Returns microseconds per round trip to the side that asks, nothing to the other.
std::vector<double> ping_pong(uint32_t* lines, bool asks, uint32_t rounds, uint64_t spin_ns);

// --- A round trip as two host functions that a CUDA stream can call: what the bench compares doorbells with.

// Filled by the code that captures the calls; the arrays and the mailbox must outlive the graph.
struct HostCall {
  Mailbox* mailbox;
  uint32_t slot;
  uint32_t layer;
  const void* hidden_states;
  const int32_t* topk_ids;
  const float* topk_weights;
  uint32_t rows;
  float* output;
  uint64_t deadline_ms;
  uint64_t epoch = 0;
  uint64_t failures = 0;  // calls that threw: no exception may leave a host function
};

// The argument of both is a HostCall.
void submit_on_host(void* call);
void collect_on_host(void* call);

}  // namespace moebius::mailbox
