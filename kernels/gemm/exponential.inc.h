// The exponential function and what is made of it, once for all widths. Included INSIDE an anonymous namespace of a
// *_<isa>.cc file, after Vec: nothing here may get external linkage.

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln2/2: Taylor to r^7 (relative error < 2e-8 before rounding).
// ln 2 is split in two so that r is exact. The limits keep n small; above 89 the result is infinite all the same.
// NaN passes through min and max.
[[gnu::always_inline]] inline Vec exponential(Vec x) {
  x = Vec::min(Vec::broadcast(128.0f), Vec::max(Vec::broadcast(-87.0f), x));
  const Vec n = Vec::round(Vec::mul(x, Vec::broadcast(1.44269504f)));
  Vec r = Vec::fma(n, Vec::broadcast(-0.693359375f), x);
  r = Vec::fma(n, Vec::broadcast(2.12194440e-4f), r);
  Vec y = Vec::broadcast(1.0f / 5040);
  constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (float c : kTaylor) y = Vec::fma(y, r, Vec::broadcast(c));
  return Vec::scale_by_power(y, n);
}

[[gnu::always_inline]] inline Vec sigmoid(Vec x) {
  const Vec one = Vec::broadcast(1.0f);
  return Vec::div(one, Vec::add(one, exponential(Vec::sub(Vec::zero(), x))));
}

// x * sigmoid(alpha * x), rounded once where the product of both is rounded twice. alpha 1: SiLU.
[[gnu::always_inline]] inline Vec swish(Vec x, Vec alpha) {
  const Vec e = exponential(Vec::mul(Vec::sub(Vec::zero(), alpha), x));
  return Vec::div(x, Vec::add(Vec::broadcast(1.0f), e));
}
