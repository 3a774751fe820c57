// Eight float32 lanes of AVX2, FMA and F16C; the face is that of vec_avx512.inc.h. Included INSIDE an anonymous
// namespace of an *_avx2.cc file: nothing here may get external linkage.

struct Vec {
  static constexpr uint32_t kLanes = 8;

  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec load(const float* at) { return {_mm256_loadu_ps(at)}; }
  static Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
  // x[0], x[1], x[0], x[1], ...
  static Vec broadcast_pair(const float* x) {
    const __m128i pair = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    return {_mm256_castsi256_ps(_mm256_broadcastq_epi64(pair))};
  }
  static Vec from_bits(__m256i bits) { return {_mm256_castsi256_ps(bits)}; }
  static Vec from_integers(__m256i integers) { return {_mm256_cvtepi32_ps(integers)}; }
  // kLanes elements of memory, exactly.
  static Vec from_bfloat16(const void* at) {
    return from_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))), 16));
  }
  static Vec from_float16(const void* at) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(at)))};
  }
  // e4m3 seeeemmm -> the float16 s0eeeemmm0000000, which is 2^-8 times its value (subnormals too) unless it is NaN.
  static Vec from_float8(const void* at) {
    const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(at)));
    const __m128i shifted = _mm_srai_epi16(_mm_slli_epi16(codes, 8), 1);
    const __m128i halves = _mm_and_si128(shifted, _mm_set1_epi16(static_cast<short>(0xbf80)));
    const Vec value = mul({_mm256_cvtph_ps(halves)}, broadcast(256.0f));
    return where_equal(abs(value), broadcast(480.0f), broadcast(__builtin_nanf("")), value);
  }
  static Vec from_unsigned_bytes(const void* at) { return from_integers(load_bytes(at)); }
  static Vec from_signed_bytes(const void* at) {
    return from_integers(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(at))));
  }
  // Words' upper four bits s as 2 s + 1.
  static Vec from_top_bits(const void* at) {
    const __m256i s = _mm256_srli_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(at)), 28);
    return from_integers(_mm256_or_si256(_mm256_add_epi32(s, s), _mm256_set1_epi32(1)));
  }
  // Three bits s of halves, 6, 7 and 14, as 2 s + 1.
  static Vec from_iq1_s(const void* at) {
    const __m256i signs = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at)));
    const auto bits = [signs](int shift, int mask) {
      return _mm256_and_si256(_mm256_srli_epi32(signs, shift), _mm256_set1_epi32(mask));
    };
    const __m256i twice = _mm256_or_si256(bits(5, 6), bits(11, 8));
    return from_integers(_mm256_or_si256(twice, _mm256_set1_epi32(1)));
  }
  // Of group kGroup of eight, in bytes that groups share, the first one's lowest: kLowBits and, above them, kHighBits.
  template <int kLowBits, int kHighBits, int kGroup>
  static __m256i whole_field(const std::byte* low, const std::byte* high) {
    constexpr int kLow = kGroup * kLowBits, kHigh = kGroup * kHighBits, kShift = kLowBits - kHigh % 8;
    const __m256i held = _mm256_srli_epi32(load_bytes(low), kLow % 8);
    const __m256i found = _mm256_and_si256(held, _mm256_set1_epi32((1 << kLowBits) - 1));
    if constexpr (kHighBits == 0) {
      return found;
    } else {
      const __m256i bytes = load_bytes(high);
      const __m256i moved = kShift < 0 ? _mm256_srli_epi32(bytes, kShift < 0 ? -kShift : 0)
                                     : _mm256_slli_epi32(bytes, kShift < 0 ? 0 : kShift);
      const __m256i mask = _mm256_set1_epi32(((1 << kHighBits) - 1) << kLowBits);
      return _mm256_or_si256(found, _mm256_and_si256(moved, mask));
    }
  }
  static Vec less(__m256i integers, int middle) {
    return from_integers(_mm256_sub_epi32(integers, _mm256_set1_epi32(middle)));
  }
  static Vec twice_and_one(__m256i s) {
    return from_integers(_mm256_or_si256(_mm256_add_epi32(s, s), _mm256_set1_epi32(1)));
  }
  static __m256i load_bytes(const void* at) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(at)));
  }

  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  static Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
  static Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
  static Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
  // b where either is NaN.
  static Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
  static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
  static Vec abs(Vec a) { return {_mm256_andnot_ps(broadcast(-0.0f).v, a.v)}; }
  static Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vec copy_sign(Vec magnitude, Vec sign) {
    return {_mm256_or_ps(abs(magnitude).v, _mm256_and_ps(broadcast(-0.0f).v, sign.v))};
  }
  static Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
  }
  static Vec where_equal(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ))};
  }
  // y * 2^n for whole n in [-250, 250]: in two steps, each of which a float32 exponent holds.
  static Vec scale_by_power(Vec y, Vec n) {
    const __m256i whole = _mm256_cvtps_epi32(n.v);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    return mul(mul(y, power(half)), power(_mm256_sub_epi32(whole, half)));
  }
  static Vec power(__m256i n) { return from_bits(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }

  // e8m0: 2^(code - 127); 0 is a subnormal, 255 NaN.
  static Vec from_e8m0_codes(__m256i codes) {
    const __m256i ends = _mm256_or_si256(_mm256_cmpeq_epi32(codes, _mm256_setzero_si256()),
                                         _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(255)));
    const __m256i bit = _mm256_and_si256(ends, _mm256_set1_epi32(0x400000));
    return from_bits(_mm256_or_si256(_mm256_slli_epi32(codes, 23), bit));
  }

  void store(float* at) const { _mm256_storeu_ps(at, v); }
  // Lanes below `count` (0 to kLanes); the others read as zero and are not written.
  static __m256i first(size_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
  }
  static Vec load_first(const float* at, size_t count) { return {_mm256_maskload_ps(at, first(count))}; }
  void store_first(float* at, size_t count) const { _mm256_maskstore_ps(at, first(count), v); }

  // Eight int32 -> eight uint16 (0 to 65535) or int16.
  static __m128i pack_unsigned(__m256i x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  // Rounds to nearest even; a NaN stays one.
  void store_bfloat16(uint16_t* at) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), pack_unsigned(_mm256_srli_epi32(kept, 16)));
  }
  // Rounds to nearest even; |v| <= 127.
  void store_int8(int8_t* at) const {
    const __m256i whole = _mm256_cvtps_epi32(v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), _mm_packs_epi16(words, words));
  }
  float largest() const {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  // Lanes that are NaN or infinite.
  uint32_t count_nonfinite() const {
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(v), exponent);
    const int lanes = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, exponent)));
    return static_cast<uint32_t>(__builtin_popcount(static_cast<unsigned>(lanes)));
  }
};
