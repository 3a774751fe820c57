#include "kernels/placement/forecast.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace moebius {
namespace {

// A prompt says what its output will be about; its thousands of tokens are not that many reasons to forget others.
constexpr double kPrefillTokens = 64.0;
// Half-life of what half-lives are compared by, tokens.
constexpr double kJudgedOver = 2048.0;
// Before they have seen that many tokens, forecasts lean on the next more general one: those of short half-lives on the
// longest, the longest on an even choice. At most a half-life's length.
constexpr double kPriorTokens = 32.0;

// The exchanges of one row, appended.
void exchanges_of(const double* expected, const uint8_t* resident, size_t experts, double copy_price, int64_t row,
                  std::vector<Exchange>& found) {
  double best = -1.0, worst = std::numeric_limits<double>::infinity();
  for (size_t expert = 0; expert < experts; ++expert) {
    if (resident[expert]) {
      worst = std::min(worst, expected[expert]);
    } else {
      best = std::max(best, expected[expert]);
    }
  }
  // Most rows have nothing to gain.
  if (!(best - worst > copy_price)) return;
  std::vector<int64_t> newcomers, leavers;
  for (size_t expert = 0; expert < experts; ++expert) {
    // Others cannot be in an exchange that pays.
    const double gain = resident[expert] ? best - expected[expert] : expected[expert] - worst;
    if (gain > copy_price) (resident[expert] ? leavers : newcomers).push_back(static_cast<int64_t>(expert));
  }
  const auto rises = [expected](int64_t one, int64_t other) { return expected[one] < expected[other]; };
  const auto falls = [expected](int64_t one, int64_t other) { return expected[one] > expected[other]; };
  std::stable_sort(newcomers.begin(), newcomers.end(), falls);
  std::stable_sort(leavers.begin(), leavers.end(), rises);
  for (size_t n = 0; n < std::min(newcomers.size(), leavers.size()); ++n) {
    const double gain = expected[newcomers[n]] - expected[leavers[n]] - copy_price;
    if (!(gain > 0.0)) return;
    found.push_back({row, newcomers[n], leavers[n], gain});
  }
}

}  // namespace

std::vector<Exchange> worthwhile_exchanges(const double* expected, const uint8_t* resident, size_t rows, size_t experts,
                                           double copy_price) {
  std::vector<Exchange> found;
  for (size_t row = 0; row < rows; ++row) {
    const size_t place = row * experts;
    exchanges_of(expected + place, resident + place, experts, copy_price, static_cast<int64_t>(row), found);
  }
  return found;
}

RoutingForecast::RoutingForecast(std::vector<double> half_lives, size_t layers, size_t experts, double top_k,
                                 const uint8_t* resident)
    : half_lives_(std::move(half_lives)), layers_(layers), experts_(experts), top_k_(top_k), expected_(experts) {
  const size_t rows = half_lives_.size() * layers_;
  sums_.resize(rows * experts_);
  tokens_.resize(rows);
  saved_.resize(rows);
  for (size_t n = 0; n < half_lives_.size(); ++n) {
    resident_.insert(resident_.end(), resident, resident + layers_ * experts_);
  }
}

void RoutingForecast::observe(const int64_t* decode, const int64_t* prefill, double copy_price) {
  const auto tokens_of = [this](const int64_t* choices) {
    return static_cast<double>(std::accumulate(choices, choices + experts_, int64_t{0})) / top_k_;
  };
  for (size_t layer = 0; layer < layers_; ++layer) {
    const int64_t* const decoded = decode + layer * experts_;
    const int64_t* const prompted = prefill + layer * experts_;
    const double prompt_tokens = tokens_of(prompted), tokens = tokens_of(decoded);
    const double scale = std::min(1.0, kPrefillTokens / std::max(prompt_tokens, 1e-9));
    add(layer, prompted, prompt_tokens * scale, scale);
    judge(layer, decoded, tokens);  // by the slots as they were before these tokens
    add(layer, decoded, tokens, 1.0);
    exchange(layer, copy_price);
  }
}

// `tokens` tokens made `choices`, each of which counts `scale` times.
void RoutingForecast::add(size_t layer, const int64_t* choices, double tokens, double scale) {
  if (tokens == 0.0) return;
  for (size_t half_life = 0; half_life < half_lives_.size(); ++half_life) {
    const size_t row = row_of(half_life, layer);
    const double kept = std::exp2(-tokens / half_lives_[half_life]);
    double* const sums = sums_.data() + row * experts_;
    for (size_t expert = 0; expert < experts_; ++expert) {
      sums[expert] = sums[expert] * kept + static_cast<double>(choices[expert]) * scale;
    }
    tokens_[row] = tokens_[row] * kept + tokens;
  }
}

void RoutingForecast::judge(size_t layer, const int64_t* decode, double tokens) {
  const double kept = std::exp2(-tokens / kJudgedOver);
  for (size_t half_life = 0; half_life < half_lives_.size(); ++half_life) {
    const size_t row = row_of(half_life, layer);
    const uint8_t* const resident = resident_.data() + row * experts_;
    int64_t hits = 0;
    for (size_t expert = 0; expert < experts_; ++expert) hits += resident[expert] ? decode[expert] : 0;
    saved_[row] = saved_[row] * kept + static_cast<double>(hits);
  }
}

void RoutingForecast::exchange(size_t layer, double copy_price) {
  for (size_t half_life = 0; half_life < half_lives_.size(); ++half_life) {
    const size_t row = row_of(half_life, layer);
    uint8_t* const resident = resident_.data() + row * experts_;
    rates_of(half_life, layer, expected_.data());
    for (double& value : expected_) value *= tokens_[row];
    found_.clear();
    exchanges_of(expected_.data(), resident, experts_, copy_price, 0, found_);
    for (const Exchange& one : found_) {
      resident[one.newcomer] = 1;
      resident[one.leaver] = 0;
    }
    if (!found_.empty()) saved_[row] -= copy_price * static_cast<double>(found_.size());
  }
}

// Choices by a token, [experts].
void RoutingForecast::rates_of(size_t half_life, size_t layer, double* rates) const {
  const size_t row = row_of(half_life, layer), longest = row_of(half_lives_.size() - 1, layer);
  const double even = top_k_ / static_cast<double>(experts_);
  const double prior = std::min(half_lives_[half_life], kPriorTokens);
  const double seen = tokens_[row] + prior, seen_by_longest = tokens_[longest] + kPriorTokens;
  for (size_t expert = 0; expert < experts_; ++expert) {
    const double usual = (sums_[longest * experts_ + expert] + kPriorTokens * even) / seen_by_longest;
    rates[expert] = (sums_[row * experts_ + expert] + prior * usual) / seen;
  }
}

void RoutingForecast::forecast(int64_t* best, double* expected, double* rates) const {
  for (size_t layer = 0; layer < layers_; ++layer) {
    size_t chosen = half_lives_.size() - 1;
    for (size_t half_life = chosen; half_life-- > 0;) {
      if (saved_[row_of(half_life, layer)] > saved_[row_of(chosen, layer)]) chosen = half_life;
    }
    best[layer] = static_cast<int64_t>(chosen);
    rates_of(chosen, layer, rates + layer * experts_);
    for (size_t expert = layer * experts_; expert < (layer + 1) * experts_; ++expert) {
      expected[expert] = rates[expert] * tokens_[row_of(chosen, layer)];
    }
  }
}

}  // namespace moebius
