// Sixteen float32 lanes of AVX-512. Included INSIDE an anonymous namespace of an *_avx512.cc file: nothing here
// may get external linkage, or the linker could keep an AVX-512 copy of a function that every machine calls.

struct Vec {
  static constexpr uint32_t kLanes = 16;

  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec load(const float* at) { return {_mm512_loadu_ps(at)}; }
  static Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  // x[0], x[1], x[0], x[1], ...
  static Vec broadcast_pair(const float* x) {
    const __m128i pair = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    return {_mm512_castsi512_ps(_mm512_broadcastq_epi64(pair))};
  }
  static Vec from_bits(__m512i bits) { return {_mm512_castsi512_ps(bits)}; }
  static Vec from_integers(__m512i integers) { return {_mm512_cvtepi32_ps(integers)}; }
  // kLanes elements of memory, exactly.
  static Vec from_bfloat16(const void* at) {
    return from_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(at))), 16));
  }
  static Vec from_float16(const void* at) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(at)))};
  }
  // e4m3 seeeemmm -> the float16 s0eeeemmm0000000, which is 2^-8 times its value (subnormals too) unless it is NaN.
  static Vec from_float8(const void* at) {
    const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(at)));
    const __m256i shifted = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1);
    const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const Vec value = mul({_mm512_cvtph_ps(halves)}, broadcast(256.0f));
    return where_equal(abs(value), broadcast(480.0f), broadcast(__builtin_nanf("")), value);
  }
  static Vec from_unsigned_bytes(const void* at) { return from_integers(load_bytes(at)); }
  static Vec from_signed_bytes(const void* at) {
    return from_integers(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
  }
  // Words' upper four bits s as 2 s + 1.
  static Vec from_top_bits(const void* at) {
    const __m512i s = _mm512_srli_epi32(_mm512_loadu_si512(at), 28);
    return from_integers(_mm512_or_si512(_mm512_add_epi32(s, s), _mm512_set1_epi32(1)));
  }
  // Three bits s of halves, 6, 7 and 14, as 2 s + 1.
  static Vec from_iq1_s(const void* at) {
    const __m512i signs = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
    const auto bits = [signs](int shift, int mask) {
      return _mm512_and_si512(_mm512_srli_epi32(signs, shift), _mm512_set1_epi32(mask));
    };
    const __m512i twice = _mm512_or_si512(bits(5, 6), bits(11, 8));
    return from_integers(_mm512_or_si512(twice, _mm512_set1_epi32(1)));
  }
  // Of group kGroup of eight, in bytes that groups share, the first one's lowest: kLowBits and, above them, kHighBits.
  template <int kLowBits, int kHighBits, int kGroup>
  static __m512i whole_field(const std::byte* low, const std::byte* high) {
    constexpr int kLow = kGroup * kLowBits, kHigh = kGroup * kHighBits, kShift = kLowBits - kHigh % 8;
    const __m512i held = _mm512_srli_epi32(load_bytes(low), kLow % 8);
    const __m512i found = _mm512_and_si512(held, _mm512_set1_epi32((1 << kLowBits) - 1));
    if constexpr (kHighBits == 0) {
      return found;
    } else {
      const __m512i bytes = load_bytes(high);
      const __m512i moved = kShift < 0 ? _mm512_srli_epi32(bytes, kShift < 0 ? -kShift : 0)
                                     : _mm512_slli_epi32(bytes, kShift < 0 ? 0 : kShift);
      const __m512i mask = _mm512_set1_epi32(((1 << kHighBits) - 1) << kLowBits);
      return _mm512_or_si512(found, _mm512_and_si512(moved, mask));
    }
  }
  static Vec less(__m512i integers, int middle) {
    return from_integers(_mm512_sub_epi32(integers, _mm512_set1_epi32(middle)));
  }
  static Vec twice_and_one(__m512i s) {
    return from_integers(_mm512_or_si512(_mm512_add_epi32(s, s), _mm512_set1_epi32(1)));
  }
  static __m512i load_bytes(const void* at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at)));
  }

  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  static Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  static Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  // b where either is NaN.
  static Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  static Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
  static Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vec copy_sign(Vec magnitude, Vec sign) {
    const __m512i bit = _mm512_set1_epi32(INT32_MIN);
    const __m512i magnitude_bits = _mm512_castps_si512(magnitude.v);
    return from_bits(_mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign.v), magnitude_bits, 0xca));
  }
  static Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
  }
  static Vec where_equal(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ), no.v, yes.v)};
  }
  // y * 2^n for whole n in [-300, 300].
  static Vec scale_by_power(Vec y, Vec n) { return {_mm512_scalef_ps(y.v, n.v)}; }

  // e8m0: 2^(code - 127); 0 is a subnormal, 255 NaN.
  static Vec from_e8m0_codes(__m512i codes) {
    const __mmask16 ends = _mm512_cmp_epu32_mask(_mm512_sub_epi32(codes, _mm512_set1_epi32(1)), _mm512_set1_epi32(253),
                                                 _MM_CMPINT_NLE);
    const __m512i bits = _mm512_slli_epi32(codes, 23);
    return from_bits(_mm512_mask_or_epi32(bits, ends, bits, _mm512_set1_epi32(0x400000)));
  }

  void store(float* at) const { _mm512_storeu_ps(at, v); }
  // Lanes below `count` (0 to kLanes); the others read as zero and are not written.
  static __mmask16 first(size_t count) { return static_cast<__mmask16>(count >= kLanes ? 0xffffu : (1u << count) - 1); }
  static Vec load_first(const float* at, size_t count) { return {_mm512_maskz_loadu_ps(first(count), at)}; }
  void store_first(float* at, size_t count) const { _mm512_mask_storeu_ps(at, first(count), v); }

  // Rounds to nearest even; a NaN stays one. kLanes elements.
  __m256i bfloat16_bits() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
  void store_bfloat16(uint16_t* at) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bfloat16_bits()); }
  // Rounds to nearest even; |v| <= 127.
  void store_int8(int8_t* at) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  float largest() const { return _mm512_reduce_max_ps(v); }
  // Lanes that are NaN or infinite.
  uint32_t count_nonfinite() const {
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(v), exponent);
    return static_cast<uint32_t>(__builtin_popcount(_mm512_cmpeq_epi32_mask(bits, exponent)));
  }
};
