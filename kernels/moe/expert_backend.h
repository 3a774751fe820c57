// The interface of the expert computation for a mailbox server or any other transport.
#pragma once

#include <chrono>
#include <cstdint>

namespace moebius {

// Element types; the first two have the numbers of DType in protos/expert.proto, which has no third.
enum class DType : uint32_t { kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

// One layer's rows with their routing. The caller owns all memory and keeps it until forward() returns.
struct ExpertRequest {
  uint32_t layer;              // model layer number
  uint32_t rows;               // 0 is allowed and computes nothing
  DType dtype;                 // of hidden_states
  const void* hidden_states;   // [rows, hidden_size], row-major
  const int32_t* topk_ids;     // [rows, top_k], global expert ids; those not held here (also -1) are skipped
  const float* topk_weights;   // [rows, top_k]
  uint32_t top_k;
};

// Computes the partial sum of a request over the experts it holds. Implementations are thread safe.
class ExpertBackend {
 public:
  virtual ~ExpertBackend() = default;
  virtual uint32_t hidden_size() const = 0;
  // Writes output [rows, hidden_size], float32: for each row the weighted sum of the experts held here,
  // zero where none was chosen. Throws std::invalid_argument when the request can not be served.
  virtual void forward(const ExpertRequest& request, float* output) = 0;
  // Calls follow one another with pauses of up to this long, through which threads had better spin. 0: nothing is
  // known of them. Not while forward() runs.
  virtual void expect_pauses(std::chrono::nanoseconds /*longest*/) {}
  // From now on adds 1 to the word (relaxed) at least once for each small piece of a call, to distinguish a long call
  // from a stuck one. Null: to none any more; waits for a running call.
  virtual void count_progress_in(uint64_t* /*word*/) {}
};

}  // namespace moebius
