// Activations, scatter and conversions, once for all widths. Included INSIDE an anonymous namespace of a
// *_<isa>.cc file, after Vec and exponential.inc.h: nothing here may get external linkage.

// The limit comes first: a NaN in x passes.
[[gnu::always_inline]] inline Vec clamp(Vec x, Vec limit) {
  return Vec::max(Vec::sub(Vec::zero(), limit), Vec::min(limit, x));
}

struct Constants {
  Vec alpha;
  Vec limit;
};

template <Activation kActivation>
[[gnu::always_inline]] inline Vec activation_of(Vec gate, Vec up, const Constants& constants) {
  const Vec one = Vec::broadcast(1.0f);
  switch (kActivation) {
    case Activation::kSilu: return Vec::mul(swish(gate, one), up);
    case Activation::kSiluClamped:
      return Vec::mul(Vec::min(constants.limit, swish(gate, one)), clamp(up, constants.limit));
    case Activation::kGptOss:
      return Vec::mul(Vec::add(clamp(up, constants.limit), one),
                      swish(Vec::min(constants.limit, gate), constants.alpha));
    case Activation::kRelu2: {
      const Vec positive = Vec::max(Vec::zero(), up);
      return Vec::mul(positive, positive);
    }
    case Activation::kGeluTanh: {
      const Vec slope = Vec::fma(Vec::broadcast(kGeluCubic), Vec::mul(gate, gate), Vec::broadcast(kGeluLinear));
      return Vec::mul(swish(gate, slope), up);
    }
    case Activation::kClampedSilu:
      return Vec::mul(swish(Vec::min(constants.limit, gate), one), clamp(up, constants.limit));
  }
  return up;
}

struct ToFloat32 {
  using Element = float;
  static void store(Vec value, float* at) { value.store(at); }
};

struct ToBFloat16 {
  using Element = uint16_t;
  static void store(Vec value, uint16_t* at) { value.store_bfloat16(at); }
};

template <class To, Activation kActivation>
void activate_rows(const ActivationWork& work) {
  constexpr bool kGated = kActivation != Activation::kRelu2;
  const bool apart = kGated && work.apart;
  const size_t block_columns = kGated && !apart ? 2 * kPanelColumns : kPanelColumns;
  const size_t to_up = !kGated ? 0 : apart ? size_t{work.num_blocks} * kPanelColumns : kPanelColumns;
  const Constants constants{Vec::broadcast(work.alpha), Vec::broadcast(work.limit)};
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    const float* gate = work.result + row * work.result_stride;
    auto* target = static_cast<typename To::Element*>(work.output) + row * work.output_stride;
    for (uint32_t block = 0; block < work.num_blocks; ++block) {
      for (uint32_t column = 0; column < kPanelColumns; column += Vec::kLanes) {
        const Vec up = Vec::load(gate + to_up + column);
        To::store(activation_of<kActivation>(Vec::load(gate + column), up, constants), target + column);
      }
      gate += block_columns;
      target += kPanelColumns;
    }
  }
}

template <class To>
void activate(const ActivationWork& work) {
  switch (work.activation) {
    case Activation::kSilu: return activate_rows<To, Activation::kSilu>(work);
    case Activation::kSiluClamped: return activate_rows<To, Activation::kSiluClamped>(work);
    case Activation::kGptOss: return activate_rows<To, Activation::kGptOss>(work);
    case Activation::kRelu2: return activate_rows<To, Activation::kRelu2>(work);
    case Activation::kGeluTanh: return activate_rows<To, Activation::kGeluTanh>(work);
    case Activation::kClampedSilu: return activate_rows<To, Activation::kClampedSilu>(work);
  }
}

void scatter(const ScatterWork& work) {
  const uint32_t whole = work.num_columns / Vec::kLanes * Vec::kLanes;
  const uint32_t rest = work.num_columns - whole;
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    const Vec weight = Vec::broadcast(work.weights[row]);
    const float* result = work.result + row * work.result_stride;
    float* output = work.output + work.row_ids[row] * work.output_stride;
    for (uint32_t i = 0; i < whole; i += Vec::kLanes) {
      Vec::fma(weight, Vec::load(result + i), Vec::load(output + i)).store(output + i);
    }
    if (rest == 0) continue;
    const Vec sum = Vec::fma(weight, Vec::load_first(result + whole, rest), Vec::load_first(output + whole, rest));
    sum.store_first(output + whole, rest);
  }
}

// `convert` on whole vectors; the rest goes through a padded copy.
template <class From, class To, class Convert>
[[gnu::always_inline]] inline void convert_all(const From* source, To* target, size_t count, Convert convert) {
  const size_t whole = count / Vec::kLanes * Vec::kLanes;
  for (size_t i = 0; i < whole; i += Vec::kLanes) convert(source + i, target + i);
  if (whole == count) return;
  From padded[Vec::kLanes] = {};
  To converted[Vec::kLanes];
  __builtin_memcpy(padded, source + whole, (count - whole) * sizeof(From));
  convert(padded, converted);
  __builtin_memcpy(target + whole, converted, (count - whole) * sizeof(To));
}

void bfloat16_to_float32(const uint16_t* source, float* target, size_t count) {
  convert_all(source, target, count, [](const uint16_t* from, float* to) { Vec::from_bfloat16(from).store(to); });
}

void float16_to_float32(const uint16_t* source, float* target, size_t count) {
  convert_all(source, target, count, [](const uint16_t* from, float* to) { Vec::from_float16(from).store(to); });
}

void float32_to_bfloat16(const float* source, uint16_t* target, size_t count) {
  convert_all(source, target, count, [](const float* from, uint16_t* to) { Vec::load(from).store_bfloat16(to); });
}

uint64_t count_nonfinite(const float* source, size_t count) {
  const size_t whole = count / Vec::kLanes * Vec::kLanes;
  uint64_t found = 0;
  for (size_t i = 0; i < whole; i += Vec::kLanes) found += Vec::load(source + i).count_nonfinite();
  return found + Vec::load_first(source + whole, count - whole).count_nonfinite();
}

float largest_magnitude(const float* source, size_t count) {
  const size_t whole = count / Vec::kLanes * Vec::kLanes;
  Vec largest = Vec::abs(Vec::load_first(source + whole, count - whole));
  for (size_t i = 0; i < whole; i += Vec::kLanes) largest = Vec::max(Vec::abs(Vec::load(source + i)), largest);
  return largest.largest();
}

// A largest magnitude below this counts as zero: its scale would be subnormal and too coarse to divide by.
constexpr float kSmallestMagnitude = 127 * 0x1p-126f;

float quantise_row(const float* source, int8_t* target, size_t count) {
  const bool finite = count_nonfinite(source, count) == 0;
  const float largest = finite ? largest_magnitude(source, count) : 0.0f;
  if (largest < kSmallestMagnitude) {
    __builtin_memset(target, 0, count);
    return finite ? 1.0f : __builtin_nanf("");
  }
  const float scale = largest / 127.0f;
  convert_all(source, target, count, [divisor = Vec::broadcast(scale)](const float* from, int8_t* to) {
    Vec::div(Vec::load(from), divisor).store_int8(to);
  });
  return scale;
}

constexpr VectorKernels kKernels{kIsa,    activate<ToFloat32>, activate<ToBFloat16>, scatter, bfloat16_to_float32,
                                 float16_to_float32, float32_to_bfloat16, quantise_row, count_nonfinite};
