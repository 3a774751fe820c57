#include "kernels/testing/random_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/format/numbers.h"

namespace moebius {
namespace {

// Eight xorshift64 streams (Marsaglia 2003, shifts 13 7 17) side by side: one vector loop, 64 bytes a step.
class RandomWords {
 public:
  static constexpr uint32_t kWords = 8;

  explicit RandomWords(uint64_t seed) {
    for (uint64_t& state : state_) {  // splitmix64 (Steele, Lea, Flood 2014) spreads the seed
      uint64_t z = seed += 0x9e3779b97f4a7c15;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
      z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
      state = (z ^ (z >> 31)) | 1;
    }
  }

  // Fills words (a multiple of kWords) with (random & keep) | set.
  void fill(uint64_t* words, size_t count, uint64_t keep, uint64_t set) {
    uint64_t state[kWords];
    std::copy_n(state_, kWords, state);
    for (size_t i = 0; i < count; i += kWords) {
      for (uint32_t j = 0; j < kWords; ++j) {
        uint64_t x = state[j];
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        state[j] = x;
        words[i + j] = (x & keep) | set;
      }
    }
    std::copy_n(state, kWords, state_);
  }

 private:
  uint64_t state_[kWords];
};

uint64_t repeat16(uint64_t bits) { return bits * 0x0001000100010001; }
uint64_t repeat8(uint64_t bits) { return bits * 0x0101010101010101; }

// Which bits of the codes are random and which are set; root mean square of what the codes mean.
struct CodeBits {
  uint64_t keep;
  uint64_t set;
  float root_mean_square;
  float middle = 0.0f;  // of codes with mins
};

// Floating-point codes: random sign and mantissa under one exponent, so magnitudes are uniform in [2^e, 2^(e+1)).
CodeBits code_bits_of(Code code, int exponent) {
  const auto e = static_cast<uint64_t>(exponent);
  const float rms = 1.5275f * std::ldexp(1.0f, exponent);  // sqrt(7 / 3): of uniform [1, 2)
  switch (code) {
    case Code::kFloat32: return {0x807fffff'807fffff, (e + 127) << 23 | (e + 127) << 55, rms};
    case Code::kBFloat16: return {repeat16(0x807f), repeat16((e + 127) << 7), rms};
    case Code::kFloat16: return {repeat16(0x83ff), repeat16((e + 15) << 10), rms};
    case Code::kFloat8: return {repeat8(0x87), repeat8(7 << 3), 1.5275f};
    case Code::kInt8: return {~uint64_t{0}, 0, 73.9f};     // uniform -128..127
    case Code::kInt4: return {~uint64_t{0}, 0, 4.637f};    // uniform -8..7
    case Code::kFloat4: return {~uint64_t{0}, 0, 2.926f};  // the 16 codes of e2m1
    case Code::kInt2: return {~uint64_t{0}, 0, 1.225f};    // uniform, as the next three
    case Code::kInt3: return {~uint64_t{0}, 0, 2.345f};
    case Code::kInt5: return {~uint64_t{0}, 0, 9.247f};
    case Code::kInt6: return {~uint64_t{0}, 0, 18.48f};
    case Code::kIq4: return {~uint64_t{0}, 0, 66.0f};
    case Code::kIq1S: return {~uint64_t{0}, 0, 6.6f};  // times the scale's whole number
    case Code::kIq1M: return {~uint64_t{0}, 0, 0.72f};
    case Code::kTq1: return {~uint64_t{0}, 0, 0.82f};
    case Code::kIq3Xxs: return {~uint64_t{0}, 0, 170.0f};  // times the scale's whole number
    case Code::kIq2Xxs: return {~uint64_t{0}, 0, 58.0f};
    case Code::kIq3S: return {~uint64_t{0}, 0, 9.2f};
    case Code::kIq2Xs:
    case Code::kIq2S: return {~uint64_t{0}, 0, 3.15f};
  }
  return {0, 0, 1.0f};
}

// With mins the codes 0..15 or 0..31.
CodeBits unsigned_bits_of(Code code) {
  if (code == Code::kInt2) return {~uint64_t{0}, 0, 1.225f, 1.5f};
  if (code == Code::kInt4) return {~uint64_t{0}, 0, 4.637f, 7.5f};
  if (code == Code::kInt5) return {~uint64_t{0}, 0, 9.247f, 15.5f};
  return {repeat8(0x1f), 0, 9.25f, 15.5f};
}

bool is_unscaled(const WeightFormat& format) { return format.scale == ScaleType::kNone && !format.column_scale; }

// Bits of about `value` > 0 in the scale's type.
uint32_t scale_bits(ScaleType type, float value) {
  const int exponent = std::ilogb(value);
  switch (type) {
    case ScaleType::kNone: return 0;
    case ScaleType::kFloat32: return std::bit_cast<uint32_t>(value);
    case ScaleType::kBFloat16: return std::bit_cast<uint32_t>(value) >> 16;
    case ScaleType::kFloat16:
    case ScaleType::kProducts: return static_cast<uint32_t>(std::max(exponent + 15, 1)) << 10;
    case ScaleType::kE8M0: return static_cast<uint32_t>(exponent + 127);
    case ScaleType::kE4M3: return static_cast<uint32_t>(std::clamp(exponent + 7, 1, 14)) << 3;
  }
  return 0;
}

void repeat_element(std::byte* target, uint32_t bits, uint32_t bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) std::memcpy(target + i * bytes, &bits, bytes);
}

// Factors that have these bits, and whole numbers that are 1.
void repeat_product(const PanelLayout& layout, std::byte* target, const std::byte* scales, uint32_t bits) {
  repeat_element(target, bits, 2, layout.whole_offset / 2);
  const bool shared = (layout.joined && target != scales) || is_grid(layout.format.code);
  if (layout.whole_low_bits != 0) {
    // 1 as 2 s + 1, or as 1 more than the middle of 6 bits.
    const bool of_grid = is_grid(layout.format.code);
    const size_t end = layout.signs_offset - layout.scales_offset;
    std::memset(target + layout.whole_offset, of_grid ? 0 : 0x11, layout.whole_high_offset - layout.whole_offset);
    std::memset(target + layout.whole_high_offset, of_grid ? 0 : 0xaa, end - layout.whole_high_offset);
    return;
  }
  if (!shared) std::memset(target + layout.whole_offset, layout.joined ? 0x11 : 1, size_t{layout.groups} * kPanelColumns);
}

class PanelFiller {
 public:
  explicit PanelFiller(const PanelLayout& layout) : layout_(layout) {
    const float wanted = 1.0f / std::sqrt(static_cast<float>(layout.k));
    const WeightFormat& format = layout.format;
    codes_ = format.mins ? unsigned_bits_of(format.code)
                             : code_bits_of(format.code, is_unscaled(format) ? std::ilogb(wanted / 1.5275f) : 0);
    const float scale = wanted / codes_.root_mean_square;
    // With both, the group scales are about 1 and the column scale does the rest.
    group_scale_ = format.column_scale ? 1.0f : scale;
    column_scale_ = scale;
  }

  void fill(RandomWords& random, std::byte* panel) const {
    const WeightFormat& format = layout_.format;
    random.fill(words(panel), layout_.scales_offset / 8, codes_.keep, codes_.set);
    const uint32_t bytes = scale_bytes(format.scale);
    const size_t scales = size_t{layout_.groups} * (format.panel_scale ? 1 : kPanelColumns);
    fill_scales(panel, panel + layout_.scales_offset, scale_bits(format.scale, group_scale_), bytes, scales);
    if (sign_bytes(format.code) != 0) {
      random.fill(words(panel + layout_.signs_offset), (layout_.zeros_offset - layout_.signs_offset) / 8, ~uint64_t{0}, 0);
    }
    if (format.zeros) {  // 6 or 7: near the codes' mean
      const size_t count = (layout_.column_scale_offset - layout_.zeros_offset) / 8;
      random.fill(words(panel + layout_.zeros_offset), count, repeat8(1), repeat8(6));
    }
    if (format.mins) {  // brings the codes' mean to zero
      const float scale = decode_float16(static_cast<uint16_t>(scale_bits(format.scale, group_scale_)));
      fill_scales(panel, panel + layout_.mins_offset, encode_float16(-codes_.middle * scale), bytes, scales);
    }
    if (format.column_scale) {
      repeat_element(panel + layout_.column_scale_offset, std::bit_cast<uint32_t>(column_scale_), 4, kPanelColumns);
    }
    if (layout_.has_bias) fill_bias(random, panel + layout_.bias_offset);
  }

  // Columns from `begin` on become padding. The scale of a whole panel has to stay.
  void clear_columns(std::byte* panel, uint32_t begin) const {
    const WeightFormat& format = layout_.format;
    clear_each_line(panel, layout_.scales_offset / 64, 64, begin * 4);
    const uint32_t bytes = scale_bytes(format.scale);
    if (format.scale == ScaleType::kProducts) {
      clear_factors(panel + layout_.scales_offset, begin);
      if (format.mins) clear_factors(panel + layout_.mins_offset, begin);
    } else if (!format.panel_scale) {
      clear_each_line(panel + layout_.scales_offset, layout_.groups, kPanelColumns * bytes, begin * bytes);
    }
    if (format.zeros) clear_each_line(panel + layout_.zeros_offset, layout_.groups, kPanelColumns, begin);
    if (format.mins && format.scale != ScaleType::kProducts) {
      clear_each_line(panel + layout_.mins_offset, layout_.groups, kPanelColumns * bytes, begin * bytes);
    }
    if (format.column_scale) clear_each_line(panel + layout_.column_scale_offset, 1, 64, begin * 4);
    if (layout_.has_bias) clear_each_line(panel + layout_.bias_offset, 1, 64, begin * 4);
  }

 private:
  static uint64_t* words(std::byte* at) { return reinterpret_cast<uint64_t*>(at); }

  static void clear_each_line(std::byte* at, size_t lines, uint32_t line_bytes, uint32_t from) {
    for (size_t i = 0; i < lines; ++i) std::memset(at + i * line_bytes + from, 0, line_bytes - from);
  }

  // Of products: without its factor a column's scales are zero.
  void clear_factors(std::byte* section, uint32_t begin) const {
    clear_each_line(section, layout_.whole_offset / 32, 32, begin * 2);
  }

  void fill_scales(const std::byte* panel, std::byte* section, uint32_t bits, uint32_t bytes, size_t count) const {
    if (layout_.format.scale == ScaleType::kProducts) return repeat_product(layout_, section, panel + layout_.scales_offset, bits);
    repeat_element(section, bits, bytes, count);
  }

  static void fill_bias(RandomWords& random, std::byte* bias) {
    uint64_t bits[RandomWords::kWords];
    random.fill(bits, RandomWords::kWords, 0x007fffff'007fffff, 0x3f800000'3f800000);  // [1, 2)
    float values[kPanelColumns];
    std::memcpy(values, bits, sizeof(values));
    for (float& value : values) value -= 1.5f;
    std::memcpy(bias, values, sizeof(values));
  }

  const PanelLayout& layout_;
  CodeBits codes_;
  float group_scale_;
  float column_scale_;
};

void fill_panels(const PanelLayout& layout, uint32_t panels, uint32_t panels_per_block, uint32_t num_columns,
                 RandomWords& random, std::byte* target) {
  const PanelFiller filler(layout);
  for (uint32_t panel = 0; panel < panels; ++panel, target += layout.panel_bytes) {
    filler.fill(random, target);
    const uint32_t column = panel / panels_per_block * kPanelColumns;
    if (column + kPanelColumns > num_columns) filler.clear_columns(target, num_columns - column);
  }
}

}  // namespace

void fill_random_expert(const ExpertLayout& layout, uint64_t seed, std::byte* target) {
  RandomWords random(seed);
  const uint32_t together = layout.mixed ? 1 : layout.panels_per_column_block;
  if (layout.mixed) fill_panels(layout.gate, layout.intermediate_blocks, 1, layout.intermediate_size, random, target);
  fill_panels(layout.gate_up, layout.intermediate_blocks * together, together, layout.intermediate_size, random,
              layout.mixed ? target + layout.up_offset : target);
  fill_panels(layout.down, layout.down_panels, 1, layout.hidden_size, random, target + layout.down_offset);
  if (layout.gate_up.format.ordered) {
    // Any order costs as much: that of the rows.
    auto* const order = reinterpret_cast<uint32_t*>(target + layout.order_offset);
    for (uint32_t i = 0; i < layout.hidden_size; ++i) order[i] = i;
  }
}

void fill_random(ExpertEngine& engine, uint32_t layer, uint64_t seed) {
  engine.fill(layer, [&](uint32_t expert, std::byte* target) {
    fill_random_expert(engine.store().layout(layer), seed * engine.store().num_experts() + expert, target);
  });
}

}  // namespace moebius
