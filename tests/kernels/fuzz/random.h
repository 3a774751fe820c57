// Random numbers that are the same for a seed on every machine and library.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

namespace moebius::fuzz {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed * 0x9e3779b97f4a7c15ULL + 1) {}

  uint32_t bits() { return static_cast<uint32_t>(engine_() >> 32); }
  uint32_t below(uint32_t limit) { return static_cast<uint32_t>(uint64_t{bits()} * limit >> 32); }
  uint32_t between(uint32_t first, uint32_t last) { return first + below(last - first + 1); }
  bool one_in(uint32_t n) { return below(n) == 0; }
  float uniform() { return static_cast<float>(bits() >> 8) * 0x1p-24f; }  // [0, 1)

  // Near enough to normal, variance 1.
  float normal() {
    float sum = 0.0f;
    for (int i = 0; i < 6; ++i) sum += uniform();
    return (sum - 3.0f) * 1.41421356f;
  }

  // Small numbers often, up to `most` sometimes, and the edges of blocks of 16 and 64 often.
  uint32_t size(uint32_t most) {
    uint32_t value = most >> below(static_cast<uint32_t>(std::log2(most)) + 1);
    value = value < 2 ? 1 : between(value / 2, value);
    if (one_in(3)) value = (value + 15) / 16 * 16;
    if (one_in(4)) value = (value + 63) / 64 * 64;
    if (one_in(4)) value += below(3) - 1;
    return std::min(std::max(value, 1u), most);
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace moebius::fuzz
