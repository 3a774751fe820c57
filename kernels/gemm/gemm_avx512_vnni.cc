// Two GEMMs with vpdpbusd: bfloat16 rows, each in two bytes, by 4-bit codes (dot_split.inc.h), and
// int8 rows by int8 weights (W8A8), which wants one unsigned operand: weights plus 128 are, and
// 128 times the sum of the row is taken off again. Integer sums are exact, so results do not depend on how rows
// and panels are grouped.
#include <immintrin.h>

#include <utility>

#include "kernels/format/codebooks.h"
#include "kernels/format/grids.h"
#include "kernels/gemm/gemm.h"
#include "kernels/isa/isa.h"

namespace moebius {
namespace {

#define MOEBIUS_INLINE [[gnu::always_inline]] inline

#include "kernels/gemm/code_planes.inc.h"
#include "kernels/gemm/widen_scales.inc.h"
#include "kernels/gemm/panel_walk.inc.h"
#include "kernels/gemm/dot_split.inc.h"
#include "kernels/gemm/grid_lines.inc.h"
#include "kernels/gemm/grid_gemm.inc.h"

constexpr int kMaxRows = 8;  // times two panels: what fits into registers

bool supports(const WeightFormat& format) {
  return format.code == Code::kInt8 && format.quantised_rows && format.group_size == 0;
}

// -128 * the sum of every row.
size_t scratch_bytes(const PanelLayout&, uint32_t, uint32_t num_rows) {
  return (size_t{num_rows} * sizeof(int32_t) + 63) / 64 * 64;
}

void make_offsets(const GemmWork& work, int32_t* offsets) {
  const __m512i ones = _mm512_set1_epi8(1);
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    const int8_t* values = static_cast<const int8_t*>(work.rows[row]);
    __m512i sum = _mm512_setzero_si512();
    for (uint32_t k = 0; k < work.layout->k_padded; k += 64) {
      sum = _mm512_dpbusd_epi32(sum, ones, _mm512_load_si512(values + k));
    }
    offsets[row] = -128 * _mm512_reduce_add_epi32(sum);
  }
}

// kPanels neighbouring panels, so that a broadcast quad of the row serves all of them.
template <int kRows, int kPanels>
void run_block(const GemmWork& work, const int32_t* offsets, uint32_t panel, uint32_t first_row) {
  const PanelLayout& layout = *work.layout;
  const std::byte* codes = work.panels + panel * layout.panel_bytes;
  const int32_t* rows[kRows];
  __m512i sums[kRows][kPanels];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    rows[r] = static_cast<const int32_t*>(work.rows[first_row + static_cast<uint32_t>(r)]);
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) sums[r][p] = _mm512_set1_epi32(offsets[first_row + static_cast<uint32_t>(r)]);
  }
  const __m512i sign = _mm512_set1_epi8(-128);
  const uint32_t lines = layout.k_padded / 4;
  const size_t codes_bytes = size_t{lines} * 64;
  // What follows a panel is being read already: reading goes on after it, or elsewhere after the last.
  const bool is_last = panel + kPanels >= work.num_panels && work.next != nullptr;
  const std::byte* next = is_last ? work.next : codes + kPanels * layout.panel_bytes;
  const auto others_bytes = static_cast<size_t>(next - codes) - layout.panel_bytes;
  for (uint32_t line = 0; line < lines; ++line) {
    const size_t offset = size_t{line} * 64;
    const size_t ahead = kPrefetchBytes + (offset + kPrefetchBytes < codes_bytes ? 0 : others_bytes);
    __m512i weights[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const std::byte* at = codes + static_cast<size_t>(p) * layout.panel_bytes + offset;
      _mm_prefetch(reinterpret_cast<const char*>(at) + ahead, _MM_HINT_T0);
      weights[p] = _mm512_xor_si512(_mm512_load_si512(at), sign);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512i quad = _mm512_set1_epi32(rows[r][line]);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], weights[p], quad);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) {
    const std::byte* end = codes + static_cast<size_t>(p) * layout.panel_bytes;
    const __m512 scale = layout.format.column_scale ? _mm512_loadu_ps(end + layout.column_scale_offset)
                                                    : _mm512_set1_ps(1.0f);
    const __m512 bias = layout.has_bias ? _mm512_loadu_ps(end + layout.bias_offset) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const uint32_t row = first_row + static_cast<uint32_t>(r);
      const __m512 row_scale = _mm512_set1_ps(work.row_scales[row]);
      const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][p]), _mm512_mul_ps(row_scale, scale));
      float* target = work.result + row * work.result_stride + (panel + static_cast<uint32_t>(p)) * kPanelColumns;
      _mm512_store_ps(target, _mm512_add_ps(product, bias));
    }
  }
}

template <int kPanels, int... kRowsMinusOne>
void run_rows(const GemmWork& work, const int32_t* offsets, uint32_t panel, uint32_t row, uint32_t rows,
              std::integer_sequence<int, kRowsMinusOne...>) {
  using BlockFunction = void (*)(const GemmWork&, const int32_t*, uint32_t, uint32_t);
  static constexpr BlockFunction kTable[] = {run_block<kRowsMinusOne + 1, kPanels>...};
  kTable[rows - 1](work, offsets, panel, row);
}

// All rows of one or two panels, in equal blocks: weights come from memory once.
template <int kPanels>
void run_panels(const GemmWork& work, const int32_t* offsets, uint32_t panel) {
  uint32_t row = 0;
  for (uint32_t left = (work.num_rows + kMaxRows - 1) / kMaxRows; left > 0; --left) {
    const uint32_t rows = (work.num_rows - row + left - 1) / left;
    run_rows<kPanels>(work, offsets, panel, row, rows, std::make_integer_sequence<int, kMaxRows>());
    row += rows;
  }
}

// One row reads one stream; several rows are short of load ports before they are short of bandwidth.
void run(const GemmWork& work) {
  int32_t* offsets = reinterpret_cast<int32_t*>(work.scratch);
  make_offsets(work, offsets);
  uint32_t panel = 0;
  if (work.num_rows > 1) {
    for (; panel + 2 <= work.num_panels; panel += 2) run_panels<2>(work, offsets, panel);
  }
  for (; panel < work.num_panels; ++panel) run_panels<1>(work, offsets, panel);
}

constexpr GemmKernel kDot{"avx512_vnni_int8", Isa::kAvx512Vnni, RowType::kInt8, 0, 0, supports, scratch_bytes,
                             run};
constexpr GemmKernel kSplit{"avx512_vnni_split", Isa::kAvx512Vnni, RowType::kBFloat16, 0, 0,
                               supports_or_expands<supports_split>, scratch_or_expands<no_scratch>,
                               run_or_expands<run_split>, row_bytes_or_expands<split_bytes>,
                               prepare_or_expands<prepare_split>};
constexpr const GemmKernel* kKernels[] = {&kDot, &kSplit};

}  // namespace

GemmKernels gemms_avx512_vnni() { return {kKernels, 2}; }

}  // namespace moebius
