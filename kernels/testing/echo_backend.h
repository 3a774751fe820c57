// A backend whose answer is an exact function of every part of its input, for tests and the mailbox bench.
#pragma once

#include <cstdint>
#include <mutex>

#include "kernels/moe/expert_backend.h"

namespace moebius::mailbox {

struct EchoOptions {
  uint32_t hidden_size;
  float scale = 1.0f;
  uint64_t delay_us = 0;    // time a forward takes on top, asleep in pieces of 10 ms that count as progress
  int64_t fail_layer = -1;  // forward of this layer throws
};

// output[r, h] = scale * hidden_states[r, h] + (layer + 1) * sum_k topk_weights[r, k] * (topk_ids[r, k] + 1);
// exact in float32 for the small integers and quarters that tests use.
class EchoBackend : public ExpertBackend {
 public:
  explicit EchoBackend(const EchoOptions& options) : options_(options) {}
  uint32_t hidden_size() const override { return options_.hidden_size; }
  void forward(const ExpertRequest& request, float* output) override;
  void count_progress_in(uint64_t* word) override;

 private:
  void delay();

  const EchoOptions options_;
  std::mutex progress_mutex_;
  uint64_t* progress_ = nullptr;  // under progress_mutex_
};

// The value a bfloat16 stands for.
float bfloat16_value(uint16_t bits);

}  // namespace moebius::mailbox
