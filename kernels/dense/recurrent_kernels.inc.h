// Layers with a state of each request, and gates of what layers compute, once for all widths. Included INSIDE an
// anonymous namespace of a *_<isa>.cc file, after row_kernels.inc.h's types: nothing here may get external linkage.

template <class Type>
void convolve_typed(const ConvolveWork& work) {
  using Element = typename Type::Element;
  const auto* const row = static_cast<const Element*>(work.row);
  const auto* const recent = static_cast<const Element*>(work.recent);
  const auto* const input_gates = static_cast<const Element*>(work.input_gates);
  const auto* const output_gates = static_cast<const Element*>(work.output_gates);
  auto* const next = static_cast<Element*>(work.next);
  auto* const output = static_cast<Element*>(work.output);
  const uint32_t last = work.width - 1;
  // `load(memory)` and `store(value, memory)` of whole vectors, or of one element.
  const auto channels = [&](uint32_t i, auto load, auto load_tap, auto store) {
    Vec total = Vec::zero();
    for (uint32_t tap = 0; tap <= last; ++tap) {
      Vec input = load(tap < last ? recent + tap * work.stride + i : row + i);
      if (tap == last && input_gates != nullptr) input = rounded<Type>(Vec::mul(input, load(input_gates + i)));
      total = Vec::fma(input, load_tap(work.taps + tap * work.stride + i), total);
      if (tap > 0) store(input, next + (tap - 1) * work.stride + i);
    }
    if (work.bias != nullptr) total = Vec::add(total, load_tap(work.bias + i));
    if (work.activates) total = Vec::mul(total, sigmoid(total));
    if (output_gates != nullptr) total = Vec::mul(rounded<Type>(total), load(output_gates + i));
    store(total, output + i);
  };
  for_each(
      work.channels,
      [&](uint32_t i) {
        channels(
            i, [](const Element* from) { return Type::load(from); }, [](const float* from) { return Vec::load(from); },
            [](Vec value, Element* to) { Type::store(value, to); });
      },
      [&](uint32_t i) {
        channels(
            i, [](const Element* from) { return Vec::broadcast(load_one<Type>(from)); },
            [](const float* from) { return Vec::broadcast(*from); },
            [](Vec value, Element* to) { store_first<Type>(value, to); });
      });
}

void convolve(const ConvolveWork& work) {
  if (work.is_bfloat16) return convolve_typed<BFloat16>(work);
  convolve_typed<Float32>(work);
}

template <class Type>
float sum_of_squares(const typename Type::Element* values, uint32_t size) {
  Vec squares = Vec::zero();
  float rest = 0.0f;
  for_each(
      size,
      [&](uint32_t i) {
        const Vec value = Type::load(values + i);
        squares = Vec::fma(value, value, squares);
      },
      [&](uint32_t i) {
        const float value = load_one<Type>(values + i);
        rest += value * value;
      });
  return sum_of(squares) + rest;
}

// --- decays of elements

// log(1 + e^x) = max(x, 0) + log1p(u), u = e^-|x|; log1p(u) = 2 artanh(s), s = u / (2 + u) <= 1/3, whose series to s^15
// leaves out less than 2e-9 of the value. So it stays exact for small u, which are the slow decays.
[[gnu::always_inline]] inline Vec softplus(Vec x) {
  const Vec negative = Vec::min(x, Vec::sub(Vec::zero(), x));
  const Vec u = exponential(negative);
  const Vec s = Vec::div(u, Vec::add(Vec::broadcast(2.0f), u));
  const Vec square = Vec::mul(s, s);
  Vec series = Vec::broadcast(1.0f / 15);
  constexpr float kTerms[] = {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f};
  for (float term : kTerms) series = Vec::fma(series, square, Vec::broadcast(term));
  return Vec::fma(Vec::add(s, s), series, Vec::max(Vec::zero(), x));
}

template <class Type>
void decays_typed(const DecayWork& work) {
  const auto* const steps = static_cast<const typename Type::Element*>(work.steps);
  const Vec rate = Vec::broadcast(work.rate);
  const auto decay = [&](Vec value, Vec bias) {
    const Vec step = Vec::add(value, bias);
    if (work.bound == 0.0f) return exponential(Vec::sub(Vec::zero(), Vec::mul(rate, softplus(step))));
    return exponential(Vec::mul(Vec::broadcast(work.bound), sigmoid(Vec::mul(rate, step))));
  };
  map_row(work.size, work.decays, decay, steps, work.bias);
}

void compute_decays(const DecayWork& work) {
  if (work.is_bfloat16) return decays_typed<BFloat16>(work);
  decays_typed<Float32>(work);
}

// --- the gated delta rule

// Added to the squares of a head, see gpu_service/ops/linear_attention.py.
constexpr float kUnitEpsilon = 1e-6f;

// Of length `length`.
template <class Type>
void unit_head(const void* head, float length, uint32_t size, float* target) {
  const auto* const values = static_cast<const typename Type::Element*>(head);
  const float factor = length / __builtin_sqrtf(sum_of_squares<Type>(values, size) + kUnitEpsilon);
  map_row(size, target, [factors = Vec::broadcast(factor)](Vec value) { return Vec::mul(value, factors); }, values);
}

// Columns of the state from `column` on: read once for what is known, then, from the first-level cache, once more.
template <class Type, uint32_t kVectors>
void delta_columns(const DeltaWork& work, const float* query, const float* key, const float* decayed_key,
                   uint32_t column) {
  const float* const state = work.state + column;
  float* const next = work.next + column;
  const auto* const value = static_cast<const typename Type::Element*>(work.value) + column;
  auto* const output = static_cast<typename Type::Element*>(work.output) + column;
  Vec change[kVectors];
  Vec result[kVectors];
  for (Vec& sum : change) sum = Vec::zero();
  for (Vec& sum : result) sum = Vec::zero();
  for (uint32_t d = 0; d < work.key_dim; ++d) {
    const Vec own = Vec::broadcast(decayed_key[d]);
    const float* const row = state + size_t{d} * work.value_dim;
    for (uint32_t v = 0; v < kVectors; ++v) change[v] = Vec::fma(own, Vec::load(row + v * Vec::kLanes), change[v]);
  }
  for (uint32_t v = 0; v < kVectors; ++v) {
    change[v] = Vec::mul(Vec::broadcast(work.beta), Vec::sub(Type::load(value + v * Vec::kLanes), change[v]));
  }
  for (uint32_t d = 0; d < work.key_dim; ++d) {
    const Vec own = Vec::broadcast(key[d]);
    const Vec asked = Vec::broadcast(query[d]);
    const Vec decay = Vec::broadcast(work.decays[d]);
    const float* const row = state + size_t{d} * work.value_dim;
    float* const target = next + size_t{d} * work.value_dim;
    for (uint32_t v = 0; v < kVectors; ++v) {
      const Vec kept = Vec::mul(Vec::load(row + v * Vec::kLanes), decay);
      const Vec changed = Vec::fma(own, change[v], kept);
      changed.store(target + v * Vec::kLanes);
      result[v] = Vec::fma(asked, changed, result[v]);
    }
  }
  for (uint32_t v = 0; v < kVectors; ++v) Type::store(result[v], output + v * Vec::kLanes);
}

template <class Type>
void delta_typed(const DeltaWork& work) {
  float* const query = work.scratch;
  float* const key = work.scratch + work.key_dim;
  float* const decayed_key = key + work.key_dim;
  unit_head<Type>(work.query, 1.0f / __builtin_sqrtf(static_cast<float>(work.key_dim)), work.key_dim, query);
  unit_head<Type>(work.key, 1.0f, work.key_dim, key);
  for (uint32_t d = 0; d < work.key_dim; ++d) decayed_key[d] = key[d] * work.decays[d];
  constexpr uint32_t kTogether = 4 * Vec::kLanes;
  uint32_t column = 0;
  for (; column + kTogether <= work.value_dim; column += kTogether) {
    delta_columns<Type, 4>(work, query, key, decayed_key, column);
  }
  for (; column < work.value_dim; column += Vec::kLanes) delta_columns<Type, 1>(work, query, key, decayed_key, column);
}

void update_delta(const DeltaWork& work) {
  if (work.is_bfloat16) return delta_typed<BFloat16>(work);
  delta_typed<Float32>(work);
}

// --- Mamba-2

template <class Type>
void widen(const void* from, uint32_t size, float* target) {
  const auto* const values = static_cast<const typename Type::Element*>(from);
  map_row(size, target, [](Vec value) { return value; }, values);
}

// Columns of the state from `column` on.
template <class Type, uint32_t kVectors>
void state_space_columns(const StateSpaceWork& work, const float* read, const float* write, uint32_t column) {
  const Vec decay = Vec::broadcast(work.decay);
  const auto* const value = static_cast<const typename Type::Element*>(work.value) + column;
  Vec added[kVectors];
  Vec result[kVectors];
  for (uint32_t v = 0; v < kVectors; ++v) {
    const Vec own = Type::load(value + v * Vec::kLanes);
    added[v] = Vec::mul(own, Vec::broadcast(work.step));
    result[v] = Vec::mul(own, Vec::broadcast(work.skip));
  }
  for (uint32_t d = 0; d < work.state_dim; ++d) {
    const Vec own = Vec::broadcast(write[d]);
    const Vec asked = Vec::broadcast(read[d]);
    const size_t row = size_t{d} * work.head_dim + column;
    for (uint32_t v = 0; v < kVectors; ++v) {
      const Vec kept = Vec::mul(Vec::load(work.state + row + v * Vec::kLanes), decay);
      const Vec changed = Vec::fma(own, added[v], kept);
      changed.store(work.next + row + v * Vec::kLanes);
      result[v] = Vec::fma(asked, changed, result[v]);
    }
  }
  for (uint32_t v = 0; v < kVectors; ++v) result[v].store(work.output + column + v * Vec::kLanes);
}

template <class Type>
void state_space_typed(const StateSpaceWork& work) {
  float* const read = work.scratch;
  float* const write = work.scratch + work.state_dim;
  widen<Type>(work.read, work.state_dim, read);
  widen<Type>(work.write, work.state_dim, write);
  constexpr uint32_t kTogether = 4 * Vec::kLanes;
  uint32_t column = 0;
  for (; column + kTogether <= work.head_dim; column += kTogether) {
    state_space_columns<Type, 4>(work, read, write, column);
  }
  for (; column < work.head_dim; column += Vec::kLanes) state_space_columns<Type, 1>(work, read, write, column);
}

void update_state_space(const StateSpaceWork& work) {
  if (work.is_bfloat16) return state_space_typed<BFloat16>(work);
  state_space_typed<Float32>(work);
}

// --- Mamba

// The state of one channel after the token, and what is read of it.
[[gnu::always_inline]] inline float scan_channel(const SelectiveScanWork& work, uint32_t channel, float step,
                                                 float added) {
  const size_t first = size_t{channel} * work.state_dim;
  const Vec steps = Vec::broadcast(step);
  const auto after = [&](Vec a_log, Vec before, Vec write) {
    const Vec decay = exponential(Vec::sub(Vec::zero(), Vec::mul(steps, exponential(a_log))));
    return Vec::fma(write, Vec::broadcast(added), Vec::mul(before, decay));
  };
  Vec sums = Vec::zero();
  float rest = 0.0f;
  for_each(
      work.state_dim,
      [&](uint32_t i) {
        const Vec next = after(Vec::load(work.a_log + first + i), Vec::load(work.state + first + i),
                               Vec::load(work.write + i));
        next.store(work.next + first + i);
        sums = Vec::fma(Vec::load(work.read + i), next, sums);
      },
      [&](uint32_t i) {
        const Vec next = after(Vec::broadcast(work.a_log[first + i]), Vec::broadcast(work.state[first + i]),
                               Vec::broadcast(work.write[i]));
        store_first<Float32>(next, work.next + first + i);
        rest += work.read[i] * work.next[first + i];
      });
  return sum_of(sums) + rest;
}

template <class Type>
void scan_typed(const SelectiveScanWork& work) {
  using Element = typename Type::Element;
  const auto* const dt = static_cast<const Element*>(work.steps);
  const auto* const gates = static_cast<const Element*>(work.gates);
  auto* const output = static_cast<Element*>(work.output);
  float* const steps = work.scratch;
  float* const values = steps + work.channels;
  float* const sums = values + work.channels;
  widen<Type>(work.values, work.channels, values);
  map_row(work.channels, steps, [](Vec x) { return softplus(x); }, dt);
  for (uint32_t channel = 0; channel < work.channels; ++channel) {
    sums[channel] = scan_channel(work, channel, steps[channel], steps[channel] * values[channel]);
  }
  const auto gated = [](Vec sum, Vec skip, Vec value, Vec gate) {
    return Vec::mul(Vec::fma(skip, value, sum), Vec::mul(gate, sigmoid(gate)));
  };
  map_row(work.channels, output, gated, sums, work.skip, values, gates);
}

void scan(const SelectiveScanWork& work) {
  if (work.is_bfloat16) return scan_typed<BFloat16>(work);
  scan_typed<Float32>(work);
}

template <class Type>
void gated_group_norm_typed(const GatedGroupNormWork& work) {
  using Element = typename Type::Element;
  const auto* const gates = static_cast<const Element*>(work.gates);
  const auto* const weight = static_cast<const Element*>(work.weight);
  auto* const output = static_cast<Element*>(work.output);
  float* const gated = work.scratch;
  const auto product = [](Vec value, Vec gate) { return Vec::mul(value, Vec::mul(gate, sigmoid(gate))); };
  map_row(work.size, gated, product, work.values, gates);
  const float mean = sum_of_squares<Float32>(gated, work.size) / static_cast<float>(work.size);
  const Vec factor = Vec::broadcast(1.0f / __builtin_sqrtf(mean + work.eps));
  const auto normed = [&](Vec value, Vec scale) { return Vec::mul(Vec::mul(value, factor), scale); };
  map_row(work.size, output, normed, gated, weight);
}

void gated_group_norm(const GatedGroupNormWork& work) {
  if (work.is_bfloat16) return gated_group_norm_typed<BFloat16>(work);
  gated_group_norm_typed<Float32>(work);
}

// --- gates

template <class Type>
void gated_norm_typed(const GatedNormWork& work) {
  using Element = typename Type::Element;
  const auto* const values = static_cast<const Element*>(work.values);
  const auto* const gates = static_cast<const Element*>(work.gates);
  const auto* const weight = static_cast<const Element*>(work.weight);
  auto* const output = static_cast<Element*>(work.output);
  const float mean = sum_of_squares<Type>(values, work.size) / static_cast<float>(work.size);
  const Vec factor = Vec::broadcast(1.0f / __builtin_sqrtf(mean + work.eps));
  const auto gated = [&](Vec value, Vec scale, Vec gate) {
    if (work.is_sigmoid) return Vec::mul(Vec::mul(Vec::mul(value, factor), scale), sigmoid(gate));
    const Vec normed = rounded<Type>(Vec::mul(rounded<Type>(Vec::mul(value, factor)), scale));
    return Vec::mul(normed, Vec::mul(gate, sigmoid(gate)));
  };
  map_row(work.size, output, gated, values, weight, gates);
}

void gated_norm(const GatedNormWork& work) {
  if (work.is_bfloat16) return gated_norm_typed<BFloat16>(work);
  gated_norm_typed<Float32>(work);
}

// A straight line above 20, as torch's softplus.
inline Vec softplus_weight(float x) { return Vec::broadcast(x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x))); }

template <class Type>
void apply_gate_typed(const ApplyGateWork& work) {
  using Element = typename Type::Element;
  const auto* const gates = static_cast<const Element*>(work.gates);
  const uint32_t together = work.size / work.num_gates;
  const auto multiply = [&](uint32_t begin, uint32_t size, auto weight_of) {
    const auto* const values = static_cast<const Element*>(work.values) + begin;
    auto* const output = static_cast<Element*>(work.output) + begin;
    for_each(
        size,
        [&](uint32_t i) { Type::store(Vec::mul(Type::load(values + i), weight_of(i)), output + i); },
        [&](uint32_t i) {
          store_first<Type>(Vec::mul(Vec::broadcast(load_one<Type>(values + i)), weight_of(i)), output + i);
        });
  };
  if (together == 1 && !work.is_softplus && work.size % Vec::kLanes == 0) {
    return multiply(0, work.size, [&](uint32_t i) { return rounded<Type>(sigmoid(Type::load(gates + i))); });
  }
  for (uint32_t gate = 0; gate < work.num_gates; ++gate) {
    const float own = load_one<Type>(gates + gate);
    const Vec weight = rounded<Type>(work.is_softplus ? softplus_weight(own) : sigmoid(Vec::broadcast(own)));
    multiply(gate * together, together, [&](uint32_t) { return weight; });
  }
}

void apply_gate(const ApplyGateWork& work) {
  if (work.is_bfloat16) return apply_gate_typed<BFloat16>(work);
  apply_gate_typed<Float32>(work);
}
