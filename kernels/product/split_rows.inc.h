// bfloat16 rows as 16-bit integers times a power of two for every chunk of k, in two bytes that vpdpbusd multiplies
// separately. Included INSIDE an anonymous namespace of a file built for AVX-512.
//
// A chunk's largest value takes all 15 bits, so its values down to 1/128 of that are exact, with all 8 bits of a
// bfloat16, and smaller ones are off by at most 2^-16 of it. Two exceptions: the largest mantissa is taken for its
// neighbour's last bit less (2^-15), and values below 2^-112 are zero. A chunk with a NaN or infinity gets a NaN
// scale, so that its results are NaN.
//
// A line of codes holds 8 k of each column: k+0, 4, 1, 5 in the low and k+2, 6, 3, 7 in the high halves of its bytes.
// So a line of a row is four words: the high bytes of both, then the low bytes of both.

struct SplitRow {
  const uint32_t* words;   // [k_padded / 8][4]
  const float* scales;     // [chunks]
  const int32_t* offsets;  // [chunks] the chunk's sum, times `offset` of split_row()
  const float* sums;       // [chunks] in their place, for minimums: the chunk's sum as a number
};

// Of one row: words, scales, offsets.
constexpr size_t split_row_bytes(uint32_t k_padded, uint32_t chunk_k) {
  const size_t chunks = k_padded / chunk_k;
  return (size_t{k_padded} * 2 + chunks * 8 + 63) / 64 * 64;
}

inline SplitRow split_row_at(const std::byte* scratch, uint32_t k_padded, uint32_t chunk_k) {
  const auto* scales = reinterpret_cast<const float*>(scratch + size_t{k_padded} * 2);
  const float* sums = scales + k_padded / chunk_k;
  return {reinterpret_cast<const uint32_t*>(scratch), scales, reinterpret_cast<const int32_t*>(sums), sums};
}

struct ChunkScale {
  float scale;    // of the integers
  float inverse;  // of the values
};

// From the bits of the chunk's largest absolute value.
inline ChunkScale chunk_scale(uint32_t largest_bits) {
  const auto from_bits = [](uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  };
  uint32_t exponent = largest_bits >> 23;
  if (exponent == 255) return {from_bits(0x7fc00000u), 0.0f};
  if (exponent < 15) exponent = 15;
  return {from_bits((exponent - 14) << 23), from_bits((268 - exponent) << 23)};
}

MOEBIUS_INLINE __m512i split_words(__m512i first, __m512i second) {
  const __m512i integers =
      _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)), _mm512_cvtepi32_epi16(second), 1);
  // The low byte is signed: the high one makes up for that.
  const __m512i rounded = _mm512_add_epi16(integers, _mm512_set1_epi16(128));
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 9, 3, 11, 5, 13, 7, 15, 0, 8, 2, 10, 4, 12, 6, 14));
  const __m512i low_signs = _mm512_broadcast_i32x4(_mm_set_epi64x(static_cast<int64_t>(0x8080808080808080u), 0));
  return _mm512_xor_si512(_mm512_shuffle_epi8(rounded, order), low_signs);
}

MOEBIUS_INLINE uint32_t largest_bits(__m512 values) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7fffffff));
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(bits));
}

MOEBIUS_INLINE __m512i to_integers(__m512 values, float inverse) {
  const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(inverse)));
  return _mm512_min_epi32(integers, _mm512_set1_epi32(32639));  // 127 * 256 + 127
}

// `value_scale` of the codes' unit; `offset` for each element, in those units: the negative of what codes have more
// than their values where that is constant, else -1 for zero points and 1 for minimums.
template <uint32_t kChunkK>
void split_row(const uint16_t* row, uint32_t k_padded, float value_scale, int32_t offset, std::byte* scratch) {
  static_assert(kChunkK == 16 || kChunkK == 32);
  auto* scales = reinterpret_cast<float*>(scratch + size_t{k_padded} * 2);
  auto* offsets = reinterpret_cast<int32_t*>(scales + k_padded / kChunkK);
  for (uint32_t k = 0; k < k_padded; k += 32) {
    __m512 values[2];
    __m512i integers[2];
    for (uint32_t half = 0; half < 2; ++half) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k + 16 * half));
      values[half] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    uint32_t largest[2] = {largest_bits(values[0]), largest_bits(values[1])};
    if (kChunkK == 32) largest[0] = largest[1] = largest[0] > largest[1] ? largest[0] : largest[1];
    for (uint32_t half = 0; half < 2; ++half) {
      const ChunkScale scale = chunk_scale(largest[half]);
      integers[half] = to_integers(values[half], scale.inverse);
      if (kChunkK == 32 && half == 1) break;
      *scales++ = scale.scale * value_scale;
      if (kChunkK == 16) *offsets++ = offset * _mm512_reduce_add_epi32(integers[half]);
    }
    if (kChunkK == 32) *offsets++ = offset * _mm512_reduce_add_epi32(_mm512_add_epi32(integers[0], integers[1]));
    _mm512_store_si512(scratch + size_t{k} * 2, split_words(integers[0], integers[1]));
  }
}

// The sums of chunks, made by split_row() with an offset of 1, as numbers.
template <uint32_t kChunkK>
void scale_sums(uint32_t k_padded, std::byte* scratch) {
  const uint32_t chunks = k_padded / kChunkK;
  auto* scales = reinterpret_cast<float*>(scratch + size_t{k_padded} * 2);
  float* sums = scales + chunks;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    int32_t offset;
    __builtin_memcpy(&offset, sums + chunk, sizeof offset);
    sums[chunk] = static_cast<float>(offset) * scales[chunk];
  }
}
