// One float32 lane, with the face of kernels/gemm/vec_avx512.inc.h as far as row_kernels.inc.h uses it. Included INSIDE
// an anonymous namespace.

struct Vec {
  static constexpr uint32_t kLanes = 1;

  float v;

  static Vec zero() { return {0.0f}; }
  static Vec load(const float* at) { return {*at}; }
  static Vec broadcast(float x) { return {x}; }
  static Vec from_bfloat16(const void* at) {
    const uint32_t bits = uint32_t{*static_cast<const uint16_t*>(at)} << 16;
    return {std::bit_cast<float>(bits)};
  }
  static Vec from_float8(const void* at) { return {kFloat8Values[*static_cast<const uint8_t*>(at)]}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
  static Vec add(Vec a, Vec b) { return {a.v + b.v}; }
  static Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
  static Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
  static Vec div(Vec a, Vec b) { return {a.v / b.v}; }
  // b where either is NaN.
  static Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
  static Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
  static Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return a.v < b.v ? yes : no; }
  static Vec round(Vec a) { return {std::nearbyint(a.v)}; }
  static Vec scale_by_power(Vec y, Vec n) { return {std::ldexp(y.v, static_cast<int>(n.v))}; }
  void store(float* at) const { *at = v; }
  void store_bfloat16(uint16_t* at) const { *at = encode_bfloat16(v); }
  float largest() const { return v; }
};

float sum_of(Vec x) { return x.v; }
