// Up to kMaxRows rows times one panel with vdpbf16ps. Included INSIDE the anonymous namespace of
// gemm_avx512_bf16.cc, after decode_bf16.inc.h.
//
// A row's sum does not depend on how many rows are computed together: the order of k and the split into partial
// sums are the same for every kRows.

// Sums of more rows than these do not fit into registers. Rows beyond 12 are cut into blocks of 8.
constexpr int kMaxRows = 12;
constexpr int kMaxNibbleRows = 8;
constexpr int kMaxByteGroupRows = 8;
constexpr int kBlockRows = 8;

// Rows are read as pairs of k, quads for 8-bit codes.
template <int kRows>
struct RowBlock {
  const uint32_t* row[kRows];
  const float* chunk_sums[kRows];  // with zeros or mins: sums of each chunk of the row
};

MOEBIUS_INLINE __m512 dot(__m512 sum, __m512i pairs, __m512i weights) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(pairs));
}

template <int kRows>
MOEBIUS_INLINE void clear(__m512 (&sums)[kRows]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_ps();
}

// total = the sum over groups of mins times the row's sums.
// A pass of its own: it takes few registers, and runs during the loads of the first codes.
template <ScaleType kType, int kRows>
MOEBIUS_INLINE void start_from_mins(const Panel& panel, Chunks chunks, const RowBlock<kRows>& rows,
                                    __m512 (&total)[kRows]) {
  clear(total);
  for (uint32_t chunk = 0; chunk < chunks.count; ++chunk) {
    const __m512 minimum = widen_group<kType>(panel.mins, chunk >> chunks.group_shift);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows.chunk_sums[r][chunk]), total[r]);
    }
  }
}

// 16-bit codes: a sum for even and one for odd lines.
template <int kRows>
MOEBIUS_INLINE void multiply_bfloat16(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
  __m512 odd[kRows];
  clear(total);
  clear(odd);
  const uint32_t lines = panel.k_padded / 2;
  for (uint32_t line = 0; line < lines; line += 2) {
    const std::byte* at = panel.codes + size_t{line} * 64;
    const std::byte* ahead = ahead_of(panel, at);
    prefetch(ahead);
    prefetch(ahead + 64);
    const __m512i first = _mm512_load_si512(at);
    const __m512i second = _mm512_load_si512(at + 64);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      total[r] = dot(total[r], _mm512_set1_epi32(static_cast<int>(rows.row[r][line])), first);
      odd[r] = dot(odd[r], _mm512_set1_epi32(static_cast<int>(rows.row[r][line + 1])), second);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_add_ps(total[r], odd[r]);
}

// 8-bit codes stay interleaved until the end. `ahead`: bytes, from bytes_ahead(); 0: of each line by itself.
template <class Decoder, int kRows>
MOEBIUS_INLINE void multiply_byte_lines(const Decoder& decode, const Panel& panel, uint32_t line, uint32_t end,
                                        size_t ahead, const RowBlock<kRows>& rows, __m512 (&first)[kRows],
                                        __m512 (&second)[kRows]) {
  for (; line < end; ++line) {
    const std::byte* at = panel.codes + size_t{line} * 64;
    prefetch(ahead != 0 ? at + ahead : ahead_of(panel, at));
    __m512i vectors[2];
    decode.split(at).interleaved(vectors);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      long long quad;
      __builtin_memcpy(&quad, rows.row[r] + size_t{line} * 2, sizeof quad);
      const __m512i pairs = _mm512_set1_epi64(quad);
      first[r] = dot(first[r], pairs, vectors[0]);
      second[r] = dot(second[r], pairs, vectors[1]);
    }
  }
}

// Group scales, if any, are the panel's.
template <class Decoder, int kRows>
MOEBIUS_INLINE void multiply_bytes(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
  const Decoder decode;
  prefetch(panel.next_tail);
  const uint32_t lines = panel.k_padded / 4;
  __m512 first[kRows], second[kRows];
  if (panel.group_size == 0) {
    clear(first);
    clear(second);
    multiply_byte_lines(decode, panel, 0, lines, 0, rows, first, second);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) total[r] = fold_interleaved(first[r], second[r]);
    return;
  }
  clear(total);
  const uint32_t group_lines = panel.group_size / 4;
  for (uint32_t group = 0; group * group_lines < lines; ++group) {
    const uint32_t begin = group * group_lines;
    const uint32_t end = begin + group_lines < lines ? begin + group_lines : lines;
    clear(first);
    clear(second);
    multiply_byte_lines(decode, panel, begin, end, 0, rows, first, second);
    const __m512 scale = _mm512_set1_ps(reinterpret_cast<const float*>(panel.scales.first)[group]);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      total[r] = _mm512_fmadd_ps(fold_interleaved(first[r], second[r]), scale, total[r]);
    }
  }
}

// 8-bit codes with scales per column and group: sums leave their interleaved order after each group.
template <Code kCode, ScaleType kScale, int kRows>
MOEBIUS_INLINE void multiply_byte_groups(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
  const CodeDecoder<kCode> decode;
  const uint32_t lines = panel.k_padded / 4;
  const uint32_t group_lines = panel.group_size / 4;
  const size_t tail_step = panel.tail_bytes / panel.groups;
  if (panel.mins.first != nullptr) {
    start_from_mins<kScale>(panel, chunks_of(panel, 32), rows, total);
  } else {
    clear(total);
  }
  for (uint32_t group = 0; group < panel.groups; ++group) {
    prefetch(panel.next_tail + group * tail_step);
    const uint32_t begin = group * group_lines;
    const uint32_t end = begin + group_lines < lines ? begin + group_lines : lines;
    __m512 first[kRows], second[kRows];
    clear(first);
    clear(second);
    multiply_byte_lines(decode, panel, begin, end, bytes_ahead(panel, size_t{begin} * 64), rows, first, second);
    const __m512 scale = widen_group<kScale>(panel.scales, group);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      total[r] = _mm512_fmadd_ps(fold_interleaved(first[r], second[r]), scale, total[r]);
    }
  }
}

// --- Rows times a panel of 4-bit codes with group scales.
//
// Scales and zero points are widened where they are used: less work than a pass of its own per panel, and it
// runs during the loads of the codes.

// Sums of kChunks neighbouring chunks of 4-bit codes, kLines lines (8 k each) per chunk, side by side: a chunk alone
// is a chain of dependent additions too long to hide for few rows.
template <int kChunks, int kLines, int kRows, class Decoder>
MOEBIUS_INLINE void multiply_chunks(const Decoder& decode, const std::byte* codes, size_t ahead, size_t first_line,
                                    const RowBlock<kRows>& rows, __m512 (&sum)[kChunks][kRows]) {
  __m512 odd[kChunks][kRows];
#pragma GCC unroll 4
  for (int c = 0; c < kChunks; ++c) clear(odd[c]);
#pragma GCC unroll 4
  for (int line = 0; line < kLines; ++line) {
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) {
      const size_t at = first_line + static_cast<size_t>(c * kLines + line);
      prefetch(codes + at * 64 + ahead);
      __m512i vectors[4];
      decode(codes + at * 64, vectors);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const uint32_t* pairs = rows.row[r] + at * 4;
        sum[c][r] = dot(sum[c][r], _mm512_set1_epi32(static_cast<int>(pairs[0])), vectors[0]);
        odd[c][r] = dot(odd[c][r], _mm512_set1_epi32(static_cast<int>(pairs[1])), vectors[1]);
        sum[c][r] = dot(sum[c][r], _mm512_set1_epi32(static_cast<int>(pairs[2])), vectors[2]);
        odd[c][r] = dot(odd[c][r], _mm512_set1_epi32(static_cast<int>(pairs[3])), vectors[3]);
      }
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kChunks; ++c) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sum[c][r] = _mm512_add_ps(sum[c][r], odd[c][r]);
  }
}

// 8 - zero: times the sum of the row, it is what sums of row * (code - 8) lack.
MOEBIUS_INLINE __m512 zero_term(const std::byte* zeros) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(8), _mm512_cvtepu8_epi32(bytes)));
}

template <class Format>
using NibbleDecoder = std::conditional_t<Format::kMins, UnsignedInt4Decoder, CodeDecoder<Format::kCode>>;

// Each chunk has its own sum, also within a group: groups of 64 and 128 are summed like those of 32.
template <class Format, int kChunks, int kRows>
MOEBIUS_INLINE void add_chunks(const NibbleDecoder<Format>& decode, const Panel& panel, uint32_t chunk,
                               uint32_t group_shift, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
  __m512 sum[kChunks][kRows];
#pragma GCC unroll 4
  for (uint32_t c = 0; c < kChunks; ++c) {
    clear(sum[c]);
    if constexpr (Format::kZeros) {
      const __m512 term = zero_term(panel.zeros + ((chunk + c) >> group_shift) * size_t{16});
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sum[c][r] = _mm512_mul_ps(term, _mm512_set1_ps(rows.chunk_sums[r][chunk + c]));
    }
  }
  const size_t first_line = size_t{chunk} * Format::kLines;
  multiply_chunks<kChunks, Format::kLines, kRows>(decode, panel.codes, bytes_ahead(panel, first_line * 64), first_line,
                                                  rows, sum);
#pragma GCC unroll 4
  for (uint32_t c = 0; c < kChunks; ++c) {
    const __m512 scale = widen_group<Format::kScale>(panel.scales, (chunk + c) >> group_shift);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) total[r] = _mm512_fmadd_ps(sum[c][r], scale, total[r]);
  }
}

template <class Format, int kRows>
MOEBIUS_INLINE void multiply_nibbles(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
  constexpr int kChunks = kRows > 4 ? 1 : 2;
  const NibbleDecoder<Format> decode;
  const auto [chunks, group_shift] = chunks_of(panel, 8 * Format::kLines);
  const size_t tail_step = panel.tail_bytes / chunks;
  if constexpr (Format::kMins) {
    start_from_mins<Format::kScale>(panel, {chunks, group_shift}, rows, total);
  } else {
    clear(total);
  }
  uint32_t chunk = 0;
  for (; chunk + kChunks <= chunks; chunk += kChunks) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < kChunks; ++c) prefetch(panel.next_tail + (chunk + c) * tail_step);
    add_chunks<Format, kChunks>(decode, panel, chunk, group_shift, rows, total);
  }
  if constexpr (kChunks > 1) {
    for (; chunk < chunks; ++chunk) add_chunks<Format, 1>(decode, panel, chunk, group_shift, rows, total);
  }
}
