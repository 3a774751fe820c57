// Requantising 16 columns, kLanes of them at a time. Included inside the anonymous namespace of a file built for
// one instruction set, after `constexpr int kLanes`. A lane is a column: no sum crosses lanes and nothing is
// contracted, so every instruction set gives the same bits.

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

// Memory need not be aligned to vectors; where it is, unaligned accesses cost nothing.
typedef float FloatsInMemory __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t WordsInMemory __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

Floats load(const float* source) { return *reinterpret_cast<const FloatsInMemory*>(source); }
void store(float* target, Floats values) { *reinterpret_cast<FloatsInMemory*>(target) = values; }
void store(std::byte* target, Words words) { *reinterpret_cast<WordsInMemory*>(target) = words; }
Floats absolute(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }
Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }
Floats spread(float x) { return Floats{} + x; }

// Nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
constexpr float kRound = 12582912.0f;
Floats nearest(Floats x) { return (x + kRound) - kRound; }

Floats round_bfloat16(Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  // Rounding up could carry a NaN into the sign bit.
  return x == x ? (Floats)rounded : (Floats)((bits | 0x400000u) & 0xffff0000u);
}

Floats round_float16(Floats x) {
  const Words bits = (Words)x;
  const Floats normal = (Floats)((bits + 0xfffu + ((bits >> 13) & 1u)) & 0xffffe000u);
  // Below 2^-14 the step is 2^-24, which is the step of float32 at 0.75.
  const Floats magnitude = absolute(x);
  const Words sign = bits & 0x80000000u;
  const Floats subnormal = (Floats)((Words)((magnitude + 0.75f) - 0.75f) | sign);
  const Floats finite = magnitude < 6.103515625e-05f ? subnormal : normal;
  const Floats infinite = (Floats)((Words)spread(__builtin_inff()) | sign);
  const Floats bounded = magnitude < 65520.0f ? finite : infinite;
  return x == x ? bounded : x;
}

Floats round_scale(Floats scale, ScaleType type) {
  if (type == ScaleType::kBFloat16) return round_bfloat16(scale);
  if (type == ScaleType::kFloat16) return round_float16(scale);
  return scale;
}

// 1 / scale, and 0 for scales that are zero or so small that this would not be finite.
Floats reciprocal(Floats scale) { return absolute(scale) > 1e-37f ? 1.0f / scale : Floats{}; }

void add_to(double* sums, Floats values) {
  for (int lane = 0; lane < kLanes; ++lane) sums[lane] += values[lane];
}

// ---- bfloat16 and float16: two k per line ----------------------------------------------------------------

Words float16_bits(Floats rounded) {
  const Words bits = (Words)rounded;
  const Words sign = (bits >> 16) & 0x8000u;
  const Floats magnitude = absolute(rounded);
  const Words normal = (((Words)magnitude >> 13) - (112u << 10));
  const Words subnormal = (Words)(Ints)__builtin_convertvector(
      (magnitude < 6.103515625e-05f ? magnitude : Floats{}) * 16777216.0f, Ints);
  Words result = magnitude < 6.103515625e-05f ? subnormal : normal;
  result = magnitude > 65504.0f ? (Words)(Ints{} + 0x7c00) : result;
  result = rounded == rounded ? result : (Words)(Ints{} + 0x7e00);
  return result | sign;
}

template <bool kBrain>
void to_half(const RequantiseWork& work) {
  for (int column = 0; column < 16; column += kLanes) {
    for (uint32_t begin = 0; begin < work.k_padded; begin += 64) {
      Floats error{};
      for (uint32_t k = begin; k < begin + 64; k += 2) {
        const Floats first = load(work.weights + 16 * k + column);
        const Floats second = load(work.weights + 16 * (k + 1) + column);
        const Floats low = kBrain ? round_bfloat16(first) : round_float16(first);
        const Floats high = kBrain ? round_bfloat16(second) : round_float16(second);
        const Words word = kBrain ? ((Words)low >> 16) | (Words)high : float16_bits(low) | (float16_bits(high) << 16);
        store(work.codes + 32 * k + 4 * column, word);
        error += (first - low) * (first - low) + (second - high) * (second - high);
      }
      add_to(work.squared_error + column, error);
    }
  }
}

// ---- int8: one scale per column, four k per line ---------------------------------------------------------

// Largest magnitudes are clipped when that makes the error of the others smaller.
constexpr float kInt8Clips[] = {1.0f, 1.0f / 1.04f, 1.0f / 1.1f, 1.0f / 1.2f, 1.0f / 1.4f, 1.0f / 1.7f};

Floats int8_code(Floats weight, Floats inverse) {
  return larger(smaller(nearest(weight * inverse), spread(127.0f)), spread(-127.0f));
}

// Squared errors of two scales over a column, in blocks so that float32 sums stay exact enough to compare.
void int8_errors(const float* weights, uint32_t k_padded, Floats scale_a, Floats scale_b, Floats& error_a,
                 Floats& error_b) {
  const Floats inverse_a = reciprocal(scale_a), inverse_b = reciprocal(scale_b);
  error_a = error_b = Floats{};
  for (uint32_t begin = 0; begin < k_padded; begin += 64) {
    Floats sum_a{}, sum_b{};
    for (uint32_t k = begin; k < begin + 64; ++k) {
      const Floats weight = load(weights + 16 * k);
      const Floats difference_a = weight - int8_code(weight, inverse_a) * scale_a;
      const Floats difference_b = weight - int8_code(weight, inverse_b) * scale_b;
      sum_a += difference_a * difference_a;
      sum_b += difference_b * difference_b;
    }
    error_a += sum_a;
    error_b += sum_b;
  }
}

Floats best_int8_scale(const RequantiseWork& work, int column) {
  const float* weights = work.weights + column;
  Floats most{}, nonfinite{};
  for (uint32_t k = 0; k < work.k_padded; ++k) {
    const Floats weight = load(weights + 16 * k);
    most = larger(absolute(weight), most);
    nonfinite += weight * 0.0f;
  }
  Floats best{}, least = spread(__builtin_inff());
  for (int clip = 0; clip < 6; clip += 2) {
    const Floats scale_a = most * (kInt8Clips[clip] / 127.0f), scale_b = most * (kInt8Clips[clip + 1] / 127.0f);
    Floats error_a, error_b;
    int8_errors(weights, work.k_padded, scale_a, scale_b, error_a, error_b);
    best = error_a < least ? scale_a : best;
    least = smaller(error_a, least);
    best = error_b < least ? scale_b : best;
    least = smaller(error_b, least);
  }
  return best + nonfinite;
}

void to_int8(const RequantiseWork& work) {
  for (int column = 0; column < 16; column += kLanes) {
    const float* weights = work.weights + column;
    const Floats scale = best_int8_scale(work, column), inverse = reciprocal(scale);
    store(work.scales + column, scale);
    for (uint32_t begin = 0; begin < work.k_padded; begin += 64) {
      Floats error{};
      for (uint32_t k = begin; k < begin + 64; k += 4) {
        Words word{};
        for (int byte = 0; byte < 4; ++byte) {
          const Floats weight = load(weights + 16 * (k + byte));
          const Floats code = int8_code(weight, inverse);
          word |= ((Words)__builtin_convertvector(code, Ints) & 0xffu) << (8 * byte);
          error += (weight - code * scale) * (weight - code * scale);
        }
        store(work.codes + 16 * k + 4 * column, word);
      }
      add_to(work.squared_error + column, error);
    }
  }
}

// ---- int4: a scale per group, eight k per line -----------------------------------------------------------

// The largest weight of a group divided by one of these is the first guess of its scale: at -8 it just reaches
// code -8, beyond that it is clipped, at +7 it takes the positive end.
constexpr float kInt4Divisors[] = {-8.0f, -8.5f, -7.5f, -9.0f, 7.0f, 7.5f, -9.75f, 8.0f};

struct Group {
  const float* weights;  // first row of the group, this column
  uint32_t count;        // rows
};

struct Guess {
  Floats scale, error;
};

// Codes from a first guess, then the scale that fits these codes best, rounded as it is stored:
//   sum (w - s q)^2 = sum w^2 - 2 s sum w q + s^2 sum q^2, least at s = sum w q / sum q^2.
// Two guesses at once keep the adders busy. Errors come without the constant sum w^2.
void refine_int4(const Group& group, ScaleType type, Guess& a, Guess& b) {
  const Floats inverse_a = reciprocal(a.scale), inverse_b = reciprocal(b.scale);
  Floats product_a{}, square_a{}, product_b{}, square_b{};
  for (uint32_t k = 0; k < group.count; ++k) {
    const Floats weight = load(group.weights + 16 * k);
    const Floats code_a = larger(smaller(nearest(weight * inverse_a), spread(7.0f)), spread(-8.0f));
    const Floats code_b = larger(smaller(nearest(weight * inverse_b), spread(7.0f)), spread(-8.0f));
    product_a += weight * code_a;
    square_a += code_a * code_a;
    product_b += weight * code_b;
    square_b += code_b * code_b;
  }
  a.scale = round_scale(square_a > 0.0f ? product_a / square_a : Floats{}, type);
  b.scale = round_scale(square_b > 0.0f ? product_b / square_b : Floats{}, type);
  a.error = a.scale * (a.scale * square_a - 2.0f * product_a);
  b.error = b.scale * (b.scale * square_b - 2.0f * product_b);
}

Floats best_int4_scale(const Group& group, ScaleType type) {
  Floats most{}, extreme{}, nonfinite{};
  for (uint32_t k = 0; k < group.count; ++k) {
    const Floats weight = load(group.weights + 16 * k), magnitude = absolute(weight);
    extreme = magnitude > most ? weight : extreme;
    most = larger(magnitude, most);
    nonfinite += weight * 0.0f;
  }
  Floats best{}, least{};  // error 0 is that of all codes zero
  for (int divisor = 0; divisor < 8; divisor += 2) {
    Guess a{extreme * (1.0f / kInt4Divisors[divisor]), {}}, b{extreme * (1.0f / kInt4Divisors[divisor + 1]), {}};
    refine_int4(group, type, a, b);
    best = a.error < least ? a.scale : best;
    least = smaller(a.error, least);
    best = b.error < least ? b.scale : best;
    least = smaller(b.error, least);
  }
  return best + nonfinite;
}

// Writes the codes of a group that begins at row k (a multiple of 8) and returns its squared error.
// Codes are round(w / scale) + zero within 0..15.
Floats write_int4(const RequantiseWork& work, uint32_t k, uint32_t rows, int column, Floats scale, Floats zero) {
  const Floats inverse = reciprocal(scale);
  Floats error{};
  for (uint32_t line = k; line < k + rows; line += 8) {
    Words word{};
    for (int step = 0; step < 8; ++step) {
      const Floats weight = load(work.weights + 16 * (line + step) + column);
      const Floats code = larger(smaller(nearest(weight * inverse) + zero, spread(15.0f)), Floats{});
      word |= (Words)__builtin_convertvector(code, Ints) << (4 * (step / 2) + 16 * (step & 1));
      const Floats difference = weight - (code - zero) * scale;
      error += difference * difference;
    }
    store(work.codes + 8 * line + 4 * column, word);
  }
  return error;
}

template <typename Choose>
void each_int4_group(const RequantiseWork& work, Choose choose) {
  for (int column = 0; column < 16; column += kLanes) {
    for (uint32_t begin = 0, group = 0; begin < work.k_padded; begin += work.group_size, ++group) {
      const uint32_t left = work.k_padded - begin, rows = left < work.group_size ? left : work.group_size;
      Floats scale{}, zero = spread(8.0f);
      if (begin < work.k) {
        choose(Group{work.weights + 16 * begin + column, rows}, scale, zero);
        store(work.scales + 16 * group + column, scale);
        if (work.zeros != nullptr) {
          for (int lane = 0; lane < kLanes; ++lane) {
            work.zeros[16 * group + column + lane] = static_cast<uint8_t>(zero[lane]);
          }
        }
      }
      add_to(work.squared_error + column, write_int4(work, begin, rows, column, scale, zero));
    }
  }
}

void to_int4(const RequantiseWork& work) {
  each_int4_group(work, [&](const Group& group, Floats& scale, Floats&) {
    scale = best_int4_scale(group, work.scale_type);
  });
}

// With zero points: the range between smallest and largest weight (0 included), shrunk at both ends.
constexpr float kInt4Ranges[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.72f};

void best_int4_zero(const Group& group, ScaleType type, Floats& scale, Floats& zero) {
  Floats low{}, high{}, nonfinite{};
  for (uint32_t k = 0; k < group.count; ++k) {
    const Floats weight = load(group.weights + 16 * k);
    low = smaller(weight, low);
    high = larger(weight, high);
    nonfinite += weight * 0.0f;
  }
  Floats least = spread(__builtin_inff());
  for (const float range : kInt4Ranges) {
    const Floats tried = round_scale((high - low) * (range / 15.0f), type), inverse = reciprocal(tried);
    const Floats point = larger(smaller(nearest(-low * range * inverse), spread(15.0f)), Floats{});
    Floats error{};
    for (uint32_t k = 0; k < group.count; ++k) {
      const Floats weight = load(group.weights + 16 * k);
      const Floats code = larger(smaller(nearest(weight * inverse) + point, spread(15.0f)), Floats{});
      const Floats difference = weight - (code - point) * tried;
      error += difference * difference;
    }
    scale = error < least ? tried : scale;
    zero = error < least ? point : zero;
    least = smaller(error, least);
  }
  scale += nonfinite;
}

void to_int4_zeros(const RequantiseWork& work) {
  each_int4_group(work, [&](const Group& group, Floats& scale, Floats& zero) {
    best_int4_zero(group, work.scale_type, scale, zero);
  });
}

void sum_squares(const float* weights, uint32_t k, double* squared) {
  for (int column = 0; column < 16; column += kLanes) {
    for (uint32_t begin = 0; begin < k; begin += 64) {
      const uint32_t end = begin + 64 < k ? begin + 64 : k;
      Floats sum{};
      for (uint32_t row = begin; row < end; ++row) {
        const Floats weight = load(weights + 16 * row + column);
        sum += weight * weight;
      }
      add_to(squared + column, sum);
    }
  }
}

const RequantiseKernels kKernels = {
    to_half<true>, to_half<false>, to_int8, to_int4, to_int4_zeros, sum_squares,
};
