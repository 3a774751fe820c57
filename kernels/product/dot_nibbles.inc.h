// Rows times a panel of 4-bit codes with group scales. Included INSIDE the anonymous namespace of
// products_avx512_bf16.cc, after dot_blocks.inc.h.
//
// Scales and zero points are widened where they are used: less work than a pass of its own per panel, and it
// runs beside the loads of the codes.

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
using NibbleDecoder = std::conditional_t<Format::kMinimums, UnsignedInt4Decoder, CodeDecoder<Format::kCode>>;

// Each chunk's sum begins anew, also within a group: groups of 64 and 128 are summed like those of 32.
template <class Format, int kChunks, int kRows>
MOEBIUS_INLINE void add_chunks(const NibbleDecoder<Format>& decode, const Panel& panel, uint32_t chunk,
                               uint32_t group_shift, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
  constexpr size_t kGroupBytes = group_scale_bytes(Format::kScale);
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
    const __m512 scale = widen_group<Format::kScale>(panel.scales + ((chunk + c) >> group_shift) * kGroupBytes);
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
  if constexpr (Format::kMinimums) {
    start_from_minimums(panel, {chunks, group_shift}, rows, total);
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
