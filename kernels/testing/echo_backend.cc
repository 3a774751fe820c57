#include "kernels/testing/echo_backend.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/format/numbers.h"

namespace moebius::mailbox {

float bfloat16_value(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

void EchoBackend::forward(const ExpertRequest& request, float* output) {
  if (int64_t(request.layer) == options_.fail_layer) {
    throw std::invalid_argument("echo backend is set to fail at layer " + std::to_string(request.layer));
  }
  delay();
  const size_t width = options_.hidden_size;
  for (uint32_t row = 0; row < request.rows; ++row) {
    float routed = 0;
    for (uint32_t k = 0; k < request.top_k; ++k) {
      const size_t pair = size_t{row} * request.top_k + k;
      routed += request.topk_weights[pair] * float(request.topk_ids[pair] + 1);
    }
    routed *= float(request.layer + 1);
    // One loop per type, so that the compiler can make vectors of them: benches subtract this time.
    const size_t begin = row * width;
    if (request.dtype == DType::kBFloat16) {
      const uint16_t* x = static_cast<const uint16_t*>(request.hidden_states) + begin;
      for (size_t i = 0; i < width; ++i) output[begin + i] = options_.scale * bfloat16_value(x[i]) + routed;
    } else if (request.dtype == DType::kFloat16) {
      const uint16_t* x = static_cast<const uint16_t*>(request.hidden_states) + begin;
      for (size_t i = 0; i < width; ++i) output[begin + i] = options_.scale * decode_float16(x[i]) + routed;
    } else {
      const float* x = static_cast<const float*>(request.hidden_states) + begin;
      for (size_t i = 0; i < width; ++i) output[begin + i] = options_.scale * x[i] + routed;
    }
  }
}

void EchoBackend::delay() {
  constexpr uint64_t kPieceUs = 10'000;
  for (uint64_t left = options_.delay_us; left > 0; left -= std::min(left, kPieceUs)) {
    usleep(useconds_t(std::min(left, kPieceUs)));
    const std::lock_guard guard(progress_mutex_);
    if (progress_ != nullptr) std::atomic_ref<uint64_t>(*progress_).fetch_add(1, std::memory_order_relaxed);
  }
}

void EchoBackend::count_progress_in(uint64_t* word) {
  const std::lock_guard guard(progress_mutex_);
  progress_ = word;
}

}  // namespace moebius::mailbox
