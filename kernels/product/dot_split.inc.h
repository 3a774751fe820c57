// bfloat16 rows times a panel of 4-bit codes with group scales, by vpdpbusd. Included INSIDE an anonymous namespace,
// after split_rows.inc.h, nibble_formats.inc.h and nibble_bytes.inc.h.
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
MOEBIUS_INLINE void sum_chunk(const ByteDecoder<Format::kCode>& decode, const std::byte* codes, size_t ahead,
                              size_t first_line, const SplitRow (&rows)[kRows], __m512i (&low)[kRows]) {
  __m512i high[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) high[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int line = 0; line < Format::kLines; ++line) {
    const size_t at = first_line + static_cast<size_t>(line);
    prefetch(codes + at * 64 + ahead);
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

// What codes are more than their values, times the row, is taken off from the beginning.
template <class Format, int kRows>
MOEBIUS_INLINE void begin_sums(const std::byte* zeros, uint32_t chunk, const SplitRow (&rows)[kRows],
                               __m512i (&sum)[kRows]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sum[r] = Format::kMinimums ? _mm512_setzero_si512() : _mm512_set1_epi32(rows[r].offsets[chunk]);
    if constexpr (Format::kZeros) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
      sum[r] = _mm512_mullo_epi32(sum[r], _mm512_cvtepu8_epi32(bytes));
    }
  }
}

template <class Format, int kRows>
MOEBIUS_INLINE void multiply_split(const Panel& panel, const SplitRow (&rows)[kRows], __m512 (&total)[kRows]) {
  const ByteDecoder<Format::kCode> decode;
  constexpr size_t kScaleBytes = group_scale_bytes(Format::kScale);
  const auto [chunks, group_shift] = chunks_of(panel, 8 * Format::kLines);
  const size_t tail_step = panel.tail_bytes / chunks;
  __m512 minimums[kRows];  // times the row's sums
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r] = minimums[r] = _mm512_setzero_ps();
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    prefetch(panel.next_tail + chunk * tail_step);
    const size_t first_line = size_t{chunk} * Format::kLines;
    __m512i sum[kRows];
    begin_sums<Format>(panel.zeros + (chunk >> group_shift) * size_t{16}, chunk, rows, sum);
    sum_chunk<Format>(decode, panel.codes, bytes_ahead(panel, first_line * 64), first_line, rows, sum);
    const __m512 scale = widen_group<Format::kScale>(panel.scales + (chunk >> group_shift) * kScaleBytes);
    __m512 minimum = _mm512_setzero_ps();
    if constexpr (Format::kMinimums) {
      minimum = widen_group<Format::kScale>(panel.minimums + (chunk >> group_shift) * kScaleBytes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      if constexpr (Format::kMinimums) {
        minimums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows[r].sums[chunk]), minimums[r]);
      }
      const __m512 exact = _mm512_cvtepi32_ps(sum[r]);
      total[r] = _mm512_fmadd_ps(_mm512_mul_ps(exact, _mm512_set1_ps(rows[r].scales[chunk])), scale, total[r]);
    }
  }
  if constexpr (!Format::kMinimums) return;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_add_ps(total[r], minimums[r]);
}

template <class Format, int kRows>
void run_split_block(const PanelJob& job, uint32_t row) {
  SplitRow rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    const auto* at = static_cast<const std::byte*>(job.work->rows[row + static_cast<uint32_t>(r)]);
    rows[r] = split_row_at(at, job.panel.k_padded, 8 * Format::kLines);
  }
  __m512 total[kRows];
  multiply_split<Format>(job.panel, rows, total);
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
void run_split_format(const ProductWork& work) {
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
    using Decoder = ByteDecoder<Format::kCode>;
    constexpr int32_t kOffset = Format::kMinimums ? 1 : Format::kZeros ? -1 : -Decoder::kOffset;
    constexpr uint32_t kChunkK = 8 * Format::kLines;
    split_row<kChunkK>(static_cast<const uint16_t*>(row), layout.k_padded, Decoder::kUnit, kOffset, prepared);
    if constexpr (Format::kMinimums) scale_sums<kChunkK>(layout.k_padded, prepared);
  });
}

void run_split(const ProductWork& work) {
  prefetch_first_panel(work);
  visit_nibble_format(work.layout->format, [&](auto format) { run_split_format<decltype(format)>(work); });
}
