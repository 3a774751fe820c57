// How often each expert will be chosen by the next tokens, from what earlier ones chose, and which exchanges of
// resident experts pay. gpu_service/experts/adaptive/forecast.py and policy.py say why it is done so; here is the
// arithmetic. A placement decides every 20 ms beside the thread that launches steps: as some dozens of numpy calls, each
// of which takes Python's lock again, it held that thread up for one to three milliseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moebius {

// One expert for another in a slot of the same row.
struct Exchange {
  int64_t row, newcomer, leaver;
  double gain;  // choices, less the copy's cost
};

// All exchanges that pay, by row, each expert in one of them at most; of a row those that gain most first.
// expected: choices [rows, experts] within the time for which the forecast holds. resident: [rows, experts], 1 in a slot
// or on its way there. copy_price: choices by which a newcomer must be ahead.
std::vector<Exchange> worthwhile_exchanges(const double* expected, const uint8_t* resident, size_t rows, size_t experts,
                                           double copy_price);

// Several half-lives are kept at once, each with slots of its own, which hold no weights. Not thread safe.
class RoutingForecast {
 public:
  // half_lives: decoded tokens, ascending. resident: [layers, experts], 1 in a slot now; at least one expert.
  RoutingForecast(std::vector<double> half_lives, size_t layers, size_t experts, double top_k, const uint8_t* resident);

  // Tokens that came after everything that was observed before. decode, prefill: choices [layers, experts].
  void observe(const int64_t* decode, const int64_t* prefill, double copy_price);

  // Of each layer the half-life that saved most (of equals the longest), and what it forecasts, [layers, experts]:
  // choices within as many tokens as it remembers, and choices by a token.
  void forecast(int64_t* best, double* expected, double* rates) const;

  size_t num_half_lives() const { return half_lives_.size(); }
  size_t num_layers() const { return layers_; }
  size_t num_experts() const { return experts_; }
  double* sums() { return sums_.data(); }  // [half-lives, layers, experts]: decayed sums of choices
  double* tokens() { return tokens_.data(); }  // [half-lives, layers]: of tokens

 private:
  size_t row_of(size_t half_life, size_t layer) const { return half_life * layers_ + layer; }
  void add(size_t layer, const int64_t* choices, double tokens, double scale);
  void judge(size_t layer, const int64_t* decode, double tokens);
  void exchange(size_t layer, double copy_price);
  void rates_of(size_t half_life, size_t layer, double* rates) const;

  std::vector<double> half_lives_;
  size_t layers_, experts_;
  double top_k_;
  std::vector<double> sums_, tokens_;
  std::vector<double> saved_;  // as tokens: choices that the slots saved, less those that their copies cost
  std::vector<uint8_t> resident_;  // as sums
  std::vector<double> expected_;  // [experts], between two uses
  std::vector<Exchange> found_;
};

}  // namespace moebius
