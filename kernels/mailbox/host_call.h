// A round trip as two host functions that a CUDA stream can call: what the bench compares doorbells with.
#pragma once

#include <cstdint>

#include "kernels/mailbox/mailbox.h"

namespace moebius::mailbox {

// Filled by whoever captures the calls; the arrays and the mailbox must outlive the graph.
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
