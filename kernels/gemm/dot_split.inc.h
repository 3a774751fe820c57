// bfloat16 rows as 16-bit integers times a power of two for every chunk of k, in two bytes that vpdpbusd multiplies
// separately. Included INSIDE an anonymous namespace of a file built for AVX-512.
//
// A chunk's largest value takes all 15 bits, so its values down to 1/128 of that are exact, with all 8 bits of a
// bfloat16, and smaller ones are off by at most 2^-16 of it. Two exceptions: the largest mantissa is taken for its
// neighbour's last bit less (2^-15), and values below 2^-112 are zero. A chunk with a NaN or infinity gets a NaN
// scale, so that its results are NaN.
//
// A line of codes holds 8 k of each column: k+0, 4, 1, 5 in the low and k+2, 6, 3, 7 in the high halves of its bytes.
// So a line of a row is four words: the high bytes of both, then the low bytes of both. Codes of 8 bits take two
// lines, in their natural order.

struct SplitRow {
  const uint32_t* words;   // [k_padded / 8][4]
  const float* scales;     // [chunks]
  const int32_t* offsets;  // [chunks] the chunk's sum, times `offset` of split_row()
  const float* sums;       // [chunks] in their place, for mins: the chunk's sum as a number
};

// Bytes of one row: words, scales, offsets.
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

template <bool kNatural>
MOEBIUS_INLINE __m512i split_words(__m512i first, __m512i second) {
  const __m512i integers =
      _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)), _mm512_cvtepi32_epi16(second), 1);
  // The low byte is signed: the high one makes up for that.
  const __m512i rounded = _mm512_add_epi16(integers, _mm512_set1_epi16(128));
  const __m512i order = _mm512_broadcast_i32x4(
      kNatural ? _mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14)
               : _mm_setr_epi8(1, 9, 3, 11, 5, 13, 7, 15, 0, 8, 2, 10, 4, 12, 6, 14));
  const __m512i low_signs = _mm512_broadcast_i32x4(_mm_set_epi64x(static_cast<int64_t>(0x8080808080808080u), 0));
  return _mm512_xor_si512(_mm512_shuffle_epi8(rounded, order), low_signs);
}

MOEBIUS_INLINE __m512i absolute_bits(__m512 values) {
  return _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7fffffff));
}

MOEBIUS_INLINE __m512i to_integers(__m512 values, float inverse) {
  const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(inverse)));
  return _mm512_min_epi32(integers, _mm512_set1_epi32(32639));  // 127 * 256 + 127
}

// `value_scale` of the codes' unit; `offset` for each element, in those units: the negative of what codes have more
// than their values where that is constant, else -1 for zero points and 1 for mins.
template <uint32_t kChunkK, bool kNatural>
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
    __m512i bits[2] = {absolute_bits(values[0]), absolute_bits(values[1])};
    if (kChunkK == 32) bits[0] = bits[1] = _mm512_max_epi32(bits[0], bits[1]);
    for (uint32_t half = 0; half < 2; ++half) {
      const ChunkScale scale = chunk_scale(static_cast<uint32_t>(_mm512_reduce_max_epi32(bits[half])));
      integers[half] = to_integers(values[half], scale.inverse);
      if (kChunkK == 32 && half == 1) break;
      *scales++ = scale.scale * value_scale;
      if (kChunkK == 16) *offsets++ = offset * _mm512_reduce_add_epi32(integers[half]);
    }
    if (kChunkK == 32) *offsets++ = offset * _mm512_reduce_add_epi32(_mm512_add_epi32(integers[0], integers[1]));
    _mm512_store_si512(scratch + size_t{k} * 2, split_words<kNatural>(integers[0], integers[1]));
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

// --- 4-bit codes of a line to bytes, for dot_split.inc.h. With GFNI and VBMI one half of a line or both take an
// operation less.
//
// A byte is an unsigned code, more than its value as byte_scale() says. low() takes the low nibbles of 64 bytes,
// high() the high ones.

template <Code kCode>
struct ByteDecoder;

// Codes that are their values plus kOffset of the format.
template <int kBitsOfCode>
struct PlaneDecoder {
  static constexpr int kBits = kBitsOfCode;
  explicit PlaneDecoder(const WeightFormat&) {}
  template <int kVector>
  MOEBIUS_INLINE __m512i bytes(const std::byte* planes) const {
    return plane_codes<kBits, kVector>(planes);
  }
};

// Codes of a codebook: its values plus an offset that leaves none below zero.
inline const Codebook& codebook_of(Code code) {
  return *kCodebooks[static_cast<int>(code) - static_cast<int>(Code::kIq4)];
}

constexpr int32_t kCodebookOffset = 127;

MOEBIUS_INLINE __m512i codebook_bytes(Code code) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook_of(code).values));
  return _mm512_broadcast_i32x4(_mm_add_epi8(values, _mm_set1_epi8(kCodebookOffset)));
}

struct ByteScale {
  int32_t offset;
  float unit;
};

// Of a format's bytes.
inline ByteScale byte_scale(const WeightFormat& format) {
  switch (format.code) {
    case Code::kInt2: return {2, 1.0f};
    case Code::kInt3: return {4, 1.0f};
    case Code::kInt4: return {8, 1.0f};
    case Code::kInt5: return {16, 1.0f};
    case Code::kInt6: return {32, 1.0f};
    case Code::kInt8: return {128, 1.0f};
    case Code::kFloat4: return {12, 0.5f};
    default: return {kCodebookOffset, codebook_of(format.code).unit};
  }
}

MOEBIUS_INLINE __m512i low_nibbles(__m512i both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }

MOEBIUS_INLINE __m512i high_nibbles(__m512i both) {
#ifdef __GFNI__
  // Shifts to the right by 4, by a bit matrix.
  return _mm512_gf2p8affine_epi64_epi8(both, _mm512_set1_epi64(0x1020408000000000), 0);
#else
  return low_nibbles(_mm512_srli_epi16(both, 4));
#endif
}

template <>
struct ByteDecoder<Code::kInt4> {
  static constexpr int kBits = 4;
  explicit ByteDecoder(const WeightFormat&) {}
  MOEBIUS_INLINE __m512i low(__m512i both) const { return low_nibbles(both); }
  MOEBIUS_INLINE __m512i high(__m512i both) const { return high_nibbles(both); }
};

template <>
struct ByteDecoder<Code::kFloat4> {
  static constexpr int kBits = 4;
  explicit ByteDecoder(const WeightFormat&) {}
  __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
#ifdef __AVX512VBMI__
  // vpermb looks at the low 6 bits of a byte: the table says the same whatever the upper two of them are.
  MOEBIUS_INLINE __m512i low(__m512i both) const { return _mm512_permutexvar_epi8(both, table); }
  MOEBIUS_INLINE __m512i high(__m512i both) const { return low(_mm512_srli_epi16(both, 4)); }
#else
  MOEBIUS_INLINE __m512i low(__m512i both) const { return _mm512_shuffle_epi8(table, low_nibbles(both)); }
  MOEBIUS_INLINE __m512i high(__m512i both) const { return _mm512_shuffle_epi8(table, high_nibbles(both)); }
#endif
};

template <>
struct ByteDecoder<Code::kInt2> : PlaneDecoder<2> {
  using PlaneDecoder::PlaneDecoder;
};
template <>
struct ByteDecoder<Code::kInt3> : PlaneDecoder<3> {
  using PlaneDecoder::PlaneDecoder;
};
template <>
struct ByteDecoder<Code::kInt5> : PlaneDecoder<5> {
  using PlaneDecoder::PlaneDecoder;
};
template <>
struct ByteDecoder<Code::kInt6> : PlaneDecoder<6> {
  using PlaneDecoder::PlaneDecoder;
};

template <>
struct ByteDecoder<Code::kInt8> {
  static constexpr int kBits = 8;
  explicit ByteDecoder(const WeightFormat&) {}
  template <int kVector>
  MOEBIUS_INLINE __m512i bytes(const std::byte* lines) const {
    return _mm512_xor_si512(_mm512_load_si512(lines + kVector * 64), _mm512_set1_epi8(-128));
  }
};

// Any codebook of 4 bits.
template <>
struct ByteDecoder<Code::kIq4> {
  static constexpr int kBits = 4;
  __m512i table;
  explicit ByteDecoder(const WeightFormat& format) : table(codebook_bytes(format.code)) {}
  MOEBIUS_INLINE __m512i low(__m512i both) const { return _mm512_shuffle_epi8(table, low_nibbles(both)); }
  MOEBIUS_INLINE __m512i high(__m512i both) const { return _mm512_shuffle_epi8(table, high_nibbles(both)); }
};

// --- bfloat16 rows times a panel of codes of up to 6 bits with group scales, by vpdpbusd.
//
// A code becomes a byte in one or two operations, a fraction of what a bfloat16 takes. Sums of a chunk are exact; they
// become float32 with the row's and the group's scales. So a row's result does not depend on how many rows are
// computed together.

constexpr int kMaxSplitRows = 6;  // sums of both bytes and totals stay in registers

MOEBIUS_INLINE __m512i word_of(const uint32_t* words, int index) {
  return _mm512_set1_epi32(static_cast<int>(words[index]));
}

// Adds to `low` the sums of one chunk: 256 times that of the high bytes and that of the low ones.
template <class Format, int kRows>
MOEBIUS_INLINE void sum_chunk(const ByteDecoder<Format::kCode>& decode, const Panel& panel, size_t first_line,
                              const SplitRow (&rows)[kRows], __m512i (&low)[kRows]) {
  const std::byte* const codes = panel.codes;
  const size_t near = bytes_ahead(panel, first_line * 64, kNearPrefetchBytes);
  const size_t far = bytes_ahead(panel, first_line * 64);
  __m512i high[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) high[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int line = 0; line < Format::kLines; ++line) {
    const size_t at = first_line + static_cast<size_t>(line);
    prefetch(codes + at * 64 + near);
    prefetch_second_level(codes + at * 64 + far);
    const __m512i both = _mm512_load_si512(codes + at * 64);
    const __m512i even = decode.low(both);
    const __m512i odd = decode.high(both);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const uint32_t* words = rows[r].words + at * 4;
      high[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(high[r], even, word_of(words, 0)), odd, word_of(words, 1));
      low[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(low[r], even, word_of(words, 2)), odd, word_of(words, 3));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) low[r] = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
}

// The same of codes in planes, or of 8 bits. `planes`: of the 32 k that the chunk is in, a half or, of a whole one, 0.
template <class Format, int kHalf, int kRows, int... kVectors>
MOEBIUS_INLINE void sum_plane_chunk(const ByteDecoder<Format::kCode>& decode, const std::byte* planes, size_t line,
                                    const SplitRow (&rows)[kRows], __m512i (&low)[kRows],
                                    std::integer_sequence<int, kVectors...>) {
  const __m512i bytes[] = {decode.template bytes<kHalf * 4 + kVectors>(planes)...};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const uint32_t* words = rows[r].words + line * 4;
    __m512i high = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int v = 0; v < static_cast<int>(sizeof...(kVectors)); ++v) {
      high = _mm512_dpbusd_epi32(high, bytes[v], word_of(words, v / 2 * 4 + v % 2));
      low[r] = _mm512_dpbusd_epi32(low[r], bytes[v], word_of(words, v / 2 * 4 + v % 2 + 2));
    }
    low[r] = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low[r]);
  }
}

// Adds the sums of one chunk to `sum`, and asks for the codes that are read later.
template <class Format, int kRows>
MOEBIUS_INLINE void add_chunk(const ByteDecoder<Format::kCode>& decode, const Panel& panel, uint32_t chunk,
                              const SplitRow (&rows)[kRows], __m512i (&sum)[kRows]) {
  constexpr int kBits = ByteDecoder<Format::kCode>::kBits;
  const size_t first_line = size_t{chunk} * Format::kLines;  // of 8 k
  if constexpr (kBits == 4) {
    sum_chunk<Format>(decode, panel, first_line, rows, sum);
  } else {
    const size_t offset = first_line / 4 * (kBits * 64);
    const std::byte* const planes = panel.codes + offset;
    constexpr auto kVectors = std::make_integer_sequence<int, 2 * Format::kLines>();
    if (Format::kLines == 4 || chunk % 2 == 0) {
      const size_t ahead = bytes_ahead(panel, offset);
#pragma GCC unroll 8
      for (int line = 0; line < kBits; ++line) prefetch(planes + line * 64 + ahead);
      sum_plane_chunk<Format, 0>(decode, planes, first_line, rows, sum, kVectors);
    } else if constexpr (Format::kLines == 2) {
      sum_plane_chunk<Format, 1>(decode, planes, first_line, rows, sum, kVectors);
    }
  }
}

// The excess of codes over their values, times the row, is subtracted first.
template <class Format, int kRows>
MOEBIUS_INLINE void begin_sums(const std::byte* zeros, uint32_t chunk, const SplitRow (&rows)[kRows],
                               __m512i (&sum)[kRows]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sum[r] = Format::kMins ? _mm512_setzero_si512() : _mm512_set1_epi32(rows[r].offsets[chunk]);
    if constexpr (Format::kZeros) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
      sum[r] = _mm512_mullo_epi32(sum[r], _mm512_cvtepu8_epi32(bytes));
    }
  }
}

template <class Format, int kRows>
MOEBIUS_INLINE void multiply_split(const WeightFormat& format, const Panel& panel, const SplitRow (&rows)[kRows],
                                   __m512 (&total)[kRows]) {
  const ByteDecoder<Format::kCode> decode(format);
  const auto [chunks, group_shift] = chunks_of(panel, 8 * Format::kLines);
  const size_t tail_step = panel.tail_bytes / chunks;
  __m512 mins[kRows];  // times the row's sums
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r] = mins[r] = _mm512_setzero_ps();
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    prefetch(panel.next_tail + chunk * tail_step);
    __m512i sum[kRows];
    begin_sums<Format>(panel.zeros + (chunk >> group_shift) * size_t{16}, chunk, rows, sum);
    add_chunk<Format>(decode, panel, chunk, rows, sum);
    const __m512 scale = widen_group<Format::kScale>(panel.scales, chunk >> group_shift);
    __m512 minimum = _mm512_setzero_ps();
    if constexpr (Format::kMins) {
      minimum = widen_group<Format::kScale>(panel.mins, chunk >> group_shift);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      if constexpr (Format::kMins) {
        mins[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows[r].sums[chunk]), mins[r]);
      }
      const __m512 exact = _mm512_cvtepi32_ps(sum[r]);
      total[r] = _mm512_fmadd_ps(_mm512_mul_ps(exact, _mm512_set1_ps(rows[r].scales[chunk])), scale, total[r]);
    }
  }
  if constexpr (!Format::kMins) return;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_add_ps(total[r], mins[r]);
}

template <class Format, int kRows>
void run_split_block(const PanelJob& job, uint32_t row) {
  SplitRow rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    const auto* at = static_cast<const std::byte*>(job.work->rows[row + static_cast<uint32_t>(r)]);
    rows[r] = split_row_at(at, job.panel.k_padded, 8 * Format::kLines);
  }
  __m512 total[kRows];
  multiply_split<Format>(job.work->layout->format, job.panel, rows, total);
  for (int r = 0; r < kRows; ++r) store_total(job, row + static_cast<uint32_t>(r), total[r]);
}

template <class Format, int... kRowsMinusOne>
void run_split_panel(const PanelJob& job, std::integer_sequence<int, kRowsMinusOne...>) {
  using BlockFunction = void (*)(const PanelJob& job, uint32_t row);
  static constexpr BlockFunction kTable[] = {run_split_block<Format, kRowsMinusOne + 1>...};
  uint32_t row = 0;
  for (uint32_t left = (job.work->num_rows + kMaxSplitRows - 1) / kMaxSplitRows; left > 0; --left) {
    const uint32_t rows = (job.work->num_rows - row + left - 1) / left;
    kTable[rows - 1](job, row);
    row += rows;
  }
}

template <class Format>
void run_split_format(const GemmWork& work) {
  for (uint32_t index = 0; index < work.num_panels; ++index) {
    run_split_panel<Format>(panel_job(work, index), std::make_integer_sequence<int, kMaxSplitRows>());
  }
}

bool supports_split(const WeightFormat& format) {
  return visit_nibble_format(format, [](auto) {});
}

size_t no_scratch(const PanelLayout&, uint32_t, uint32_t) { return 0; }

size_t split_bytes(const PanelLayout& layout) {
  size_t bytes = 0;
  visit_nibble_format(layout.format, [&](auto format) {
    bytes = split_row_bytes(layout.k_padded, 8 * decltype(format)::kLines);
  });
  return bytes;
}

void prepare_split(const PanelLayout& layout, const void* row, std::byte* prepared) {
  visit_nibble_format(layout.format, [&](auto format) {
    using Format = decltype(format);
    const ByteScale scale = byte_scale(layout.format);
    const int32_t offset = Format::kMins ? 1 : Format::kZeros ? -1 : -scale.offset;
    constexpr uint32_t kChunkK = 8 * Format::kLines;
    const auto* const elements = static_cast<const uint16_t*>(row);
    constexpr bool kNatural = Format::kCode == Code::kInt8;
    split_row<kChunkK, kNatural>(elements, layout.k_padded, scale.unit, offset, prepared);
    if constexpr (Format::kMins) scale_sums<kChunkK>(layout.k_padded, prepared);
  });
}

void run_split(const GemmWork& work) {
  prefetch_first_panel(work);
  visit_nibble_format(work.layout->format, [&](auto format) { run_split_format<decltype(format)>(work); });
}
