// The kernels of row_kernels.h, once for all widths. Included INSIDE an anonymous namespace of a *_<isa>.cc file, after
// Vec and sum_of(), the sum of its lanes: nothing here may get external linkage.

struct Float32 {
  using Element = float;
  static Vec load(const float* at) { return Vec::load(at); }
  static void store(Vec value, float* at) { value.store(at); }
};

struct BFloat16 {
  using Element = uint16_t;
  static Vec load(const uint16_t* at) { return Vec::from_bfloat16(at); }
  static void store(Vec value, uint16_t* at) { value.store_bfloat16(at); }
};

// Memory of pages, written by encode_float8.
struct Float8 {
  using Element = uint8_t;
  static Vec load(const uint8_t* at) { return Vec::from_float8(at); }
};

// The value as `Type` holds it.
template <class Type>
[[gnu::always_inline]] inline Vec rounded(Vec value) {
  if constexpr (std::is_same_v<Type, Float32>) {
    return value;
  } else {
    typename Type::Element held[Vec::kLanes];
    Type::store(value, held);
    return Type::load(held);
  }
}

// Calls `work` with positions of whole vectors, then what is left one by one with `single`.
template <class Whole, class Single>
[[gnu::always_inline]] inline void for_each(uint32_t size, Whole whole, Single single) {
  const uint32_t end = size / Vec::kLanes * Vec::kLanes;
  for (uint32_t i = 0; i < end; i += Vec::kLanes) whole(i);
  for (uint32_t i = end; i < size; ++i) single(i);
}

template <class Type>
[[gnu::always_inline]] inline float load_one(const typename Type::Element* at) {
  typename Type::Element padded[Vec::kLanes] = {};
  padded[0] = *at;
  float values[Vec::kLanes];
  Type::load(padded).store(values);
  return values[0];
}

template <class Type>
[[gnu::always_inline]] inline void store_one(float value, typename Type::Element* at) {
  typename Type::Element held[Vec::kLanes];
  Type::store(Vec::broadcast(value), held);
  *at = held[0];
}

// Stores the first lane.
template <class Type>
[[gnu::always_inline]] inline void store_first(Vec value, typename Type::Element* at) {
  float values[Vec::kLanes];
  value.store(values);
  store_one<Type>(values[0], at);
}

// The type of floats with this element.
template <class Element>
using FloatOf = std::conditional_t<std::is_same_v<Element, float>, Float32, BFloat16>;

// output[i] = compute(inputs[i] ...).
template <class Output, class Compute, class... Inputs>
[[gnu::always_inline]] inline void map_row(uint32_t size, Output* output, Compute compute, const Inputs*... inputs) {
  using Type = FloatOf<Output>;
  for_each(
      size, [&](uint32_t i) { Type::store(compute(FloatOf<Inputs>::load(inputs + i)...), output + i); },
      [&](uint32_t i) {
        store_first<Type>(compute(Vec::broadcast(load_one<FloatOf<Inputs>>(inputs + i))...), output + i);
      });
}

template <class Type, class Weight>
void norm_row(const NormWork& work, float factor) {
  const auto* const residual = static_cast<const typename Type::Element*>(work.residual);
  const auto* const weight = static_cast<const typename Weight::Element*>(work.weight);
  auto* const output = static_cast<typename Type::Element*>(work.output);
  const Vec factors = Vec::broadcast(factor);
  const auto normed = [&](Vec value, Vec scale) {
    return Vec::mul(rounded<Weight>(Vec::mul(value, factors)), scale);
  };
  map_row(work.size, output, normed, residual, weight);
}

template <class Type, class Update>
float add_row(const NormWork& work) {
  auto* const residual = static_cast<typename Type::Element*>(work.residual);
  const auto* const update = static_cast<const typename Update::Element*>(work.update);
  Vec squares = Vec::zero();
  float rest = 0.0f;
  for_each(
      work.size,
      [&](uint32_t i) {
        Vec value = Type::load(residual + i);
        if (update != nullptr) {
          value = rounded<Type>(Vec::add(value, Update::load(update + i)));
          Type::store(value, residual + i);
        }
        squares = Vec::fma(value, value, squares);
      },
      [&](uint32_t i) {
        if (update != nullptr) store_one<Type>(load_one<Type>(residual + i) + load_one<Update>(update + i), residual + i);
        const float value = load_one<Type>(residual + i);
        rest += value * value;
      });
  return sum_of(squares) + rest;
}

template <class Type>
void add_norm_typed(const NormWork& work) {
  const float squares = work.update_is_bfloat16 ? add_row<Type, BFloat16>(work) : add_row<Type, Float32>(work);
  const float factor = 1.0f / __builtin_sqrtf(squares / static_cast<float>(work.size) + work.eps);
  if (work.weight_is_bfloat16) return norm_row<Type, BFloat16>(work, factor);
  norm_row<Type, Float32>(work, factor);
}

void add_norm(const NormWork& work) {
  if (work.is_bfloat16) return add_norm_typed<BFloat16>(work);
  add_norm_typed<Float32>(work);
}

// --- rotation

// values[head_dim] in float32; what they are rotated to goes to `head`.
template <class Type>
void rotate_head(const RotateWork& work, const float* values, typename Type::Element* head) {
  const auto* const cosine = static_cast<const typename Type::Element*>(work.cosine);
  const auto* const sine = static_cast<const typename Type::Element*>(work.sine);
  const uint32_t half = work.rotary_dim / 2;
  const auto single = [&](uint32_t i, uint32_t partner) {
    const float product = values[partner] * load_one<Type>(sine + i);
    store_one<Type>(values[i] * load_one<Type>(cosine + i) + product, head + i);
  };
  if (work.interleaved) {
    for (uint32_t i = 0; i < work.rotary_dim; ++i) single(i, i ^ 1);
  } else {
    for (uint32_t part = 0; part < 2; ++part) {
      const uint32_t first = part * half;
      const uint32_t other = half - first;
      for_each(
          half,
          [&](uint32_t i) {
            const Vec product = Vec::mul(Vec::load(values + other + i), Type::load(sine + first + i));
            Type::store(Vec::fma(Vec::load(values + first + i), Type::load(cosine + first + i), product),
                        head + first + i);
          },
          [&](uint32_t i) { single(first + i, other + i); });
    }
  }
  for (uint32_t i = work.rotary_dim; i < work.head_dim; i += Vec::kLanes) {
    if (i + Vec::kLanes <= work.head_dim) {
      Type::store(Vec::load(values + i), head + i);
    } else {
      for (uint32_t j = i; j < work.head_dim; ++j) store_one<Type>(values[j], head + j);
    }
  }
}

template <class Type, class Weight>
void rotate_typed(const RotateWork& work) {
  float* const values = work.scratch;
  for (uint32_t index = 0; index < work.num_heads; ++index) {
    auto* const head = static_cast<typename Type::Element*>(work.heads) + size_t{index} * work.head_stride;
    const void* const given = index < work.num_query_heads ? work.query_weight : work.key_weight;
    const auto* const weight = static_cast<const typename Weight::Element*>(given);
    Vec squares = Vec::zero();
    for (uint32_t i = 0; i < work.head_dim; i += Vec::kLanes) {
      const Vec value = Type::load(head + i);
      squares = Vec::fma(value, value, squares);
      value.store(values + i);
    }
    if (weight != nullptr) {
      const float mean = sum_of(squares) / static_cast<float>(work.head_dim);
      const Vec factor = Vec::broadcast(1.0f / __builtin_sqrtf(mean + work.eps));
      for (uint32_t i = 0; i < work.head_dim; i += Vec::kLanes) {
        const Vec normed = rounded<Weight>(Vec::mul(Vec::load(values + i), factor));
        rounded<Type>(Vec::mul(normed, Weight::load(weight + i))).store(values + i);
      }
    }
    rotate_head<Type>(work, values, head);
  }
}

void rotate(const RotateWork& work) {
  if (!work.is_bfloat16) return rotate_typed<Float32, Float32>(work);
  if (work.weights_are_bfloat16) return rotate_typed<BFloat16, BFloat16>(work);
  rotate_typed<BFloat16, Float32>(work);
}

// --- gating

[[gnu::always_inline]] inline Vec silu_of(Vec x) { return swish(x, Vec::broadcast(1.0f)); }

template <class Type>
void gate_typed(const GateWork& work) {
  const auto* const gate = static_cast<const typename Type::Element*>(work.gate_up);
  auto* const output = static_cast<typename Type::Element*>(work.output);
  const auto gated = [](Vec x, Vec y) { return Vec::mul(silu_of(x), y); };
  map_row(work.size, output, gated, gate, gate + work.size);
}

template <class Type>
void squared_relu_typed(const GateWork& work) {
  const auto* const up = static_cast<const typename Type::Element*>(work.gate_up);
  auto* const output = static_cast<typename Type::Element*>(work.output);
  const auto squared = [](Vec x) {
    const Vec positive = Vec::max(Vec::zero(), x);
    return Vec::mul(positive, positive);
  };
  map_row(work.size, output, squared, up);
}

void gate(const GateWork& work) {
  if (work.is_squared_relu) {
    if (work.is_bfloat16) return squared_relu_typed<BFloat16>(work);
    return squared_relu_typed<Float32>(work);
  }
  if (work.is_bfloat16) return gate_typed<BFloat16>(work);
  gate_typed<Float32>(work);
}

template <class Type>
void silu_typed(const SiluWork& work) {
  const auto* const values = static_cast<const typename Type::Element*>(work.values);
  auto* const output = static_cast<typename Type::Element*>(work.output);
  map_row(work.size, output, [](Vec x) { return silu_of(x); }, values);
}

void silu(const SiluWork& work) {
  if (work.is_bfloat16) return silu_typed<BFloat16>(work);
  silu_typed<Float32>(work);
}

template <class Type>
float dot_typed(const typename Type::Element* a, const float* b, uint32_t size) {
  Vec sums[2] = {Vec::zero(), Vec::zero()};
  uint32_t i = 0;
  for (; i + 2 * Vec::kLanes <= size; i += 2 * Vec::kLanes) {
    sums[0] = Vec::fma(Type::load(a + i), Vec::load(b + i), sums[0]);
    sums[1] = Vec::fma(Type::load(a + i + Vec::kLanes), Vec::load(b + i + Vec::kLanes), sums[1]);
  }
  float rest = 0.0f;
  for (; i < size; ++i) rest += load_one<Type>(a + i) * b[i];
  return sum_of(Vec::add(sums[0], sums[1])) + rest;
}

float dot(const void* a, bool is_bfloat16, const float* b, uint32_t size) {
  if (is_bfloat16) return dot_typed<BFloat16>(static_cast<const uint16_t*>(a), b, size);
  return dot_typed<Float32>(static_cast<const float*>(a), b, size);
}

// --- 8-bit floats

// Bits of the e4m3 code, without branches: compilers compute the lanes of a vector together.
[[gnu::always_inline]] inline uint8_t float8_code(float value) {
  constexpr uint32_t kInfinity = 0x7f800000, kLargest = 0x43e00000, kLeastNormal = 0x3c800000;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t kept = magnitude < kLargest ? magnitude : kLargest;
  // Three bits of the mantissa, and an exponent that is 120 less.
  const uint32_t normal = ((kept + 0x7ffff + (kept >> 20 & 1)) >> 20) - (120u << 3);
  // The unit of the last place of 2^14 is the least e4m3.
  const uint32_t whole = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, kept) + 16384.0f) - 0x46800000;
  const uint32_t finite = kept < kLeastNormal ? whole : normal;
  return static_cast<uint8_t>((magnitude < kInfinity ? finite : 0x7f) | (bits >> 24 & 0x80));
}

template <class Type>
void encode_float8_typed(const EncodeFloat8Work& work) {
  const auto* const values = static_cast<const typename Type::Element*>(work.values);
  for_each(
      work.size,
      [&](uint32_t i) {
        float scaled[Vec::kLanes];
        Vec::div(Type::load(values + i), Vec::broadcast(work.scale)).store(scaled);
        for (uint32_t lane = 0; lane < Vec::kLanes; ++lane) work.output[i + lane] = float8_code(scaled[lane]);
      },
      [&](uint32_t i) { work.output[i] = float8_code(load_one<Type>(values + i) / work.scale); });
}

void encode_float8(const EncodeFloat8Work& work) {
  if (work.is_bfloat16) return encode_float8_typed<BFloat16>(work);
  encode_float8_typed<Float32>(work);
}

// --- attention

// Heads that share a loaded key or value, and vectors of a head's output in registers.
constexpr uint32_t kHeadsTogether = 4;
constexpr uint32_t kVectorsTogether = Vec::kLanes == 8 ? 2 : 4;

struct Slots {
  explicit Slots(const AttendWork& attend) : work(attend) {}

  // Bytes from slot 0 to that of a position.
  size_t operator()(uint32_t position) const {
    const auto page = static_cast<size_t>(work.pages[position / work.page_size]);
    return (page * work.page_size + position % work.page_size) * work.slot_bytes;
  }

  const AttendWork& work;
};

// Neighbouring positions share what is loaded of a query; a score's sum is the same for any number of them.
template <class Type, uint32_t kHeads, uint32_t kPositions>
void score_positions(const AttendWork& work, uint32_t first_head, uint32_t first, const size_t* slots) {
  const float* const query = work.query + size_t{first_head} * work.head_dim;
  const typename Type::Element* keys[kPositions];
  Vec sums[kPositions][kHeads];
  for (uint32_t p = 0; p < kPositions; ++p) {
    keys[p] = reinterpret_cast<const typename Type::Element*>(work.keys + slots[first + p]);
    for (uint32_t h = 0; h < kHeads; ++h) sums[p][h] = Vec::zero();
  }
  for (uint32_t d = 0; d < work.head_dim; d += Vec::kLanes) {
    Vec values[kPositions];
    for (uint32_t p = 0; p < kPositions; ++p) values[p] = Type::load(keys[p] + d);
    for (uint32_t h = 0; h < kHeads; ++h) {
      const Vec factor = Vec::load(query + size_t{h} * work.head_dim + d);
      for (uint32_t p = 0; p < kPositions; ++p) sums[p][h] = Vec::fma(values[p], factor, sums[p][h]);
    }
  }
  for (uint32_t h = 0; h < kHeads; ++h) {
    float* const scores = work.scores + (first_head + h) * kAttendBlock + first;
    for (uint32_t p = 0; p < kPositions; ++p) scores[p] = sum_of(sums[p][h]);
  }
}

template <class Type, uint32_t kHeads>
void score_heads(const AttendWork& work, uint32_t first_head, uint32_t count, const size_t* slots) {
  uint32_t i = 0;
  for (; i + 2 <= count; i += 2) score_positions<Type, kHeads, 2>(work, first_head, i, slots);
  if (i < count) score_positions<Type, kHeads, 1>(work, first_head, i, slots);
}

// Scores become exp(score - maximum); returns what sums so far are to be multiplied by.
inline float soften(const AttendWork& work, uint32_t head, uint32_t count) {
  float* const scores = work.scores + size_t{head} * kAttendBlock;
  for (uint32_t i = count; i % Vec::kLanes != 0; ++i) scores[i] = -__builtin_inff();
  Vec largest = Vec::broadcast(work.maxima[head]);
  for (uint32_t i = 0; i < count; i += Vec::kLanes) largest = Vec::max(Vec::load(scores + i), largest);
  const float maximum = largest.largest();
  float kept[Vec::kLanes];
  exponential(Vec::broadcast(work.maxima[head] - maximum)).store(kept);
  Vec sum = Vec::zero();
  for (uint32_t i = 0; i < count; i += Vec::kLanes) {
    const Vec weight = exponential(Vec::sub(Vec::load(scores + i), Vec::broadcast(maximum)));
    weight.store(scores + i);
    sum = Vec::add(sum, weight);
  }
  for (uint32_t i = count; i % Vec::kLanes != 0; ++i) scores[i] = 0.0f;
  work.sums[head] = work.sums[head] * kept[0] + sum_of(sum);
  work.maxima[head] = maximum;
  return kept[0];
}

template <class Type, uint32_t kHeads, uint32_t kVectors>
void add_values(const AttendWork& work, uint32_t first_head, uint32_t first_column, uint32_t count,
                const size_t* slots, const float* kept) {
  Vec sums[kHeads][kVectors];
  float* const output = work.output + size_t{first_head} * work.value_dim + first_column;
  const float* const weights = work.scores + size_t{first_head} * kAttendBlock;
  for (uint32_t h = 0; h < kHeads; ++h) {
    for (uint32_t v = 0; v < kVectors; ++v) {
      sums[h][v] = Vec::mul(Vec::load(output + size_t{h} * work.value_dim + v * Vec::kLanes), Vec::broadcast(kept[h]));
    }
  }
  for (uint32_t i = 0; i < count; ++i) {
    const auto* const value = reinterpret_cast<const typename Type::Element*>(work.values + slots[i]) + first_column;
    Vec parts[kVectors];
    for (uint32_t v = 0; v < kVectors; ++v) parts[v] = Type::load(value + v * Vec::kLanes);
    for (uint32_t h = 0; h < kHeads; ++h) {
      const Vec weight = Vec::broadcast(weights[h * kAttendBlock + i]);
      for (uint32_t v = 0; v < kVectors; ++v) sums[h][v] = Vec::fma(weight, parts[v], sums[h][v]);
    }
  }
  for (uint32_t h = 0; h < kHeads; ++h) {
    for (uint32_t v = 0; v < kVectors; ++v) sums[h][v].store(output + size_t{h} * work.value_dim + v * Vec::kLanes);
  }
}

template <class Type, uint32_t kHeads>
void attend_heads(const AttendWork& work, uint32_t head, uint32_t count, const size_t* slots) {
  score_heads<Type, kHeads>(work, head, count, slots);
  float kept[kHeads];
  for (uint32_t h = 0; h < kHeads; ++h) kept[h] = soften(work, head + h, count);
  constexpr uint32_t kColumns = kVectorsTogether * Vec::kLanes;
  uint32_t column = 0;
  for (; column + kColumns <= work.value_dim; column += kColumns) {
    add_values<Type, kHeads, kVectorsTogether>(work, head, column, count, slots, kept);
  }
  for (; column < work.value_dim; column += Vec::kLanes) {
    add_values<Type, kHeads, 1>(work, head, column, count, slots, kept);
  }
}

template <class Type>
void attend_typed(const AttendWork& work) {
  const Slots slot_of(work);
  size_t slots[kAttendBlock];
  for (uint32_t h = 0; h < work.group; ++h) {
    work.maxima[h] = -__builtin_inff();
    work.sums[h] = 0.0f;
  }
  __builtin_memset(work.output, 0, size_t{work.group} * work.value_dim * sizeof(float));
  for (uint32_t begin = work.begin; begin < work.end; begin += kAttendBlock) {
    const uint32_t count = work.end - begin < kAttendBlock ? work.end - begin : kAttendBlock;
    for (uint32_t i = 0; i < count; ++i) slots[i] = slot_of(begin + i);
    uint32_t head = 0;
    for (; head + kHeadsTogether <= work.group; head += kHeadsTogether) {
      attend_heads<Type, kHeadsTogether>(work, head, count, slots);
    }
    for (; head < work.group; ++head) attend_heads<Type, 1>(work, head, count, slots);
  }
}

void attend(const AttendWork& work) {
  switch (work.page_type) {
    case PageType::kFloat32: return attend_typed<Float32>(work);
    case PageType::kBFloat16: return attend_typed<BFloat16>(work);
    case PageType::kFloat8: return attend_typed<Float8>(work);
  }
}

#include "kernels/dense/attention_tiles.inc.h"
#include "kernels/dense/latent_kernels.inc.h"
#include "kernels/dense/recurrent_kernels.inc.h"

constexpr RowKernels kKernels{add_norm,
                              rotate,
                              gate,
                              silu,
                              attend,
                              attend_tile,
                              encode_float8,
                              dot,
                              convolve,
                              compute_decays,
                              update_delta,
                              update_state_space,
                              scan,
                              gated_group_norm,
                              gated_norm,
                              apply_gate,
                              head_product,
                              transposed_head_product};
