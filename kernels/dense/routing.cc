#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <vector>

#include "kernels/dense/row_ops.h"
#include "kernels/format/numbers.h"

namespace moebius::dense {
namespace {

// Products that a thread makes in one piece: a barrier costs as much as some thousand.
constexpr size_t kLeastProducts = size_t{1} << 15;
constexpr float kNever = -std::numeric_limits<float>::infinity();

void softmax(float* values, uint32_t count) {
  const float maximum = *std::max_element(values, values + count);
  float sum = 0.0f;
  for (uint32_t i = 0; i < count; ++i) sum += values[i] = std::exp(values[i] - maximum);
  for (uint32_t i = 0; i < count; ++i) values[i] /= sum;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void score(const Routing& call, const float* logits, float* scores) {
  for (uint32_t i = 0; i < call.num_experts; ++i) {
    scores[i] = call.softcap == 0.0f ? logits[i] : std::tanh(logits[i] / call.softcap) * call.softcap;
  }
  switch (call.score) {
    case Score::kSoftmax: return softmax(scores, call.num_experts);
    case Score::kSigmoid:
      for (uint32_t i = 0; i < call.num_experts; ++i) scores[i] = sigmoid(scores[i]);
      return;
    case Score::kSqrtSoftplus:
      for (uint32_t i = 0; i < call.num_experts; ++i) {
        const float x = scores[i];
        scores[i] = std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x)));
      }
      return;
    case Score::kNone: return;
  }
}

// NaN counts as the largest, as in torch: a broken row must not look like a choice.
bool is_better(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

// The `count` best of `values`, in `places`.
void best(const float* values, uint32_t num_values, uint32_t count, std::vector<uint32_t>& places) {
  places.resize(num_values);
  std::iota(places.begin(), places.end(), 0u);
  std::partial_sort(places.begin(), places.begin() + count, places.end(), [&](uint32_t a, uint32_t b) {
    return is_better(values[a], values[b]) || (!is_better(values[b], values[a]) && a < b);
  });
  places.resize(count);
}

struct RowScratch {
  std::vector<float> scores;
  std::vector<float> choice;
  std::vector<float> group_scores;
  std::vector<uint32_t> places;
};

// Only experts of the best groups stay to be chosen.
void mask_groups(const Routing& call, RowScratch& scratch) {
  const uint32_t size = call.num_experts / call.num_groups;
  scratch.group_scores.resize(call.num_groups);
  for (uint32_t group = 0; group < call.num_groups; ++group) {
    float* const own = scratch.choice.data() + size_t{group} * size;
    best(own, size, call.group_by_maximum ? 1 : 2, scratch.places);
    float total = 0.0f;
    for (const uint32_t place : scratch.places) total += own[place];
    scratch.group_scores[group] = total;
  }
  best(scratch.group_scores.data(), call.num_groups, call.top_groups, scratch.places);
  for (uint32_t group = 0; group < call.num_groups; ++group) {
    if (std::find(scratch.places.begin(), scratch.places.end(), group) != scratch.places.end()) continue;
    std::fill_n(scratch.choice.data() + size_t{group} * size, size, kNever);
  }
}

void weigh(const Routing& call, float* weights) {
  if (call.post == Post::kSigmoid || call.post == Post::kSigmoidRenormalise) {
    for (uint32_t i = 0; i < call.top_k; ++i) weights[i] = sigmoid(weights[i]);
  }
  if (call.post == Post::kRenormalise || call.post == Post::kSigmoidRenormalise) {
    const float total = std::accumulate(weights, weights + call.top_k, 0.0f) + call.epsilon;
    for (uint32_t i = 0; i < call.top_k; ++i) weights[i] /= total;
  } else if (call.post == Post::kSoftmax) {
    softmax(weights, call.top_k);
  }
  for (uint32_t i = 0; i < call.top_k; ++i) weights[i] *= call.scale;
}

void route_row(const Routing& call, uint32_t row, RowScratch& scratch) {
  scratch.scores.resize(call.num_experts);
  score(call, call.logits + size_t{row} * call.num_experts, scratch.scores.data());
  scratch.choice = scratch.scores;
  for (uint32_t i = 0; call.correction != nullptr && i < call.num_experts; ++i) scratch.choice[i] += call.correction[i];
  if (call.top_groups < call.num_groups) mask_groups(call, scratch);
  best(scratch.choice.data(), call.num_experts, call.top_k, scratch.places);
  float* const weights = call.weights + size_t{row} * call.top_k;
  int32_t* const ids = call.ids + size_t{row} * call.top_k;
  for (uint32_t i = 0; i < call.top_k; ++i) weights[i] = scratch.scores[scratch.places[i]];
  weigh(call, weights);
  const bool is_valid = call.valid == nullptr || call.valid[row];
  for (uint32_t i = 0; i < call.top_k; ++i) ids[i] = is_valid ? static_cast<int32_t>(scratch.places[i]) : -1;
}

}  // namespace

void score_experts(DenseThreads& threads, const RouterProduct& call) {
  const std::lock_guard<std::mutex> lock(threads.call_mutex());
  const size_t elements = size_t{call.num_rows} * call.hidden_size;
  const size_t row_bytes = call.hidden_size * (call.weight_is_bfloat16 ? sizeof(uint16_t) : sizeof(float));
  const auto* rows = static_cast<const float*>(call.hidden_states);
  if (call.is_bfloat16) {
    threads.shared().grow(elements * sizeof(float));
    threads.vectors().bfloat16_to_float32(static_cast<const uint16_t*>(call.hidden_states),
                                          threads.shared().as<float>(), elements);
    rows = threads.shared().as<float>();
  }
  const auto together = static_cast<uint32_t>(std::max<size_t>(1, kLeastProducts / elements));
  threads.pool().parallel_for((call.num_experts + together - 1) / together, [&](uint32_t task, uint32_t) {
    const uint32_t end = std::min((task + 1) * together, call.num_experts);
    for (uint32_t expert = task * together; expert < end; ++expert) {
      const auto* const weight = static_cast<const std::byte*>(call.weight) + expert * row_bytes;
      for (uint32_t row = 0; row < call.num_rows; ++row) {
        const float* const own = rows + size_t{row} * call.hidden_size;
        float logit = threads.row_kernels().dot(weight, call.weight_is_bfloat16, own, call.hidden_size);
        if (call.bias != nullptr) logit += call.bias[expert];
        call.logits[size_t{row} * call.num_experts + expert] = logit;
      }
    }
  });
  if (!call.weight_is_bfloat16) return;
  for (size_t i = 0; i < size_t{call.num_rows} * call.num_experts; ++i) {
    call.logits[i] = decode_bfloat16(encode_bfloat16(call.logits[i]));
  }
}

void route(DenseThreads& threads, const Routing& call) {
  constexpr uint32_t kRowsTogether = 16;
  threads.pool().parallel_for((call.num_rows + kRowsTogether - 1) / kRowsTogether, [&](uint32_t task, uint32_t) {
    RowScratch scratch;
    const uint32_t end = std::min((task + 1) * kRowsTogether, call.num_rows);
    for (uint32_t row = task * kRowsTogether; row < end; ++row) route_row(call, row, scratch);
  });
}

}  // namespace moebius::dense
