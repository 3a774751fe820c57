// Who computes a layer's routed experts while another thread of control computes the rest of the layer.
#pragma once

#include "kernels/moe/expert_backend.h"

namespace moebius {

// One layer at a time: begin() and then finish(), by one thread.
class RoutedExperts {
 public:
  virtual ~RoutedExperts() = default;
  // Starts a layer; the request's memory stays as it is until finish() returns. Throws std::invalid_argument for a
  // request that does not fit, and what the transport throws.
  virtual void begin(const ExpertRequest& request) = 0;
  // Writes the sum of the chosen experts' weighted answers, float32 [rows, hidden_size]. Throws as begin().
  virtual void finish(float* output) = 0;
};

}  // namespace moebius
