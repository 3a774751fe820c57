// bfloat16 rows with vdpbf16ps: weights are decoded exactly, sums are float32, group scales multiply the sums.
//
// vdpbf16ps is not two fused multiply-adds: it reads subnormal inputs as zero, flushes subnormal results and
// rounds to nearest even whatever MXCSR says. Only the last bits of sums differ by that.
#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "kernels/format/codebooks.h"
#include "kernels/format/grids.h"
#include "kernels/gemm/gemm.h"
#include "kernels/isa/isa.h"

namespace moebius {
namespace {

#include "kernels/gemm/decode_bf16.inc.h"
#include "kernels/gemm/code_planes.inc.h"
#include "kernels/gemm/widen_scales.inc.h"
#include "kernels/gemm/panel_walk.inc.h"
#include "kernels/gemm/dot_blocks.inc.h"
#include "kernels/gemm/dot_split.inc.h"
#include "kernels/gemm/grid_lines.inc.h"
#include "kernels/gemm/grid_gemm.inc.h"

enum class Kind : int { kNone, kBFloat16, kFloat8, kInt8, kByteGroups, kNibbles };

bool has_half_scales(const WeightFormat& format) {
  return !format.panel_scale && (format.scale == ScaleType::kBFloat16 || format.scale == ScaleType::kFloat16);
}

bool needs_chunk_sums(const WeightFormat& format) { return format.zeros || format.mins; }

Kind kind_of(const WeightFormat& format) {
  const bool block_scales = format.panel_scale && format.scale == ScaleType::kFloat32;
  if (format.quantised_rows) return Kind::kNone;
  switch (format.code) {
    case Code::kBFloat16: return format.group_size == 0 ? Kind::kBFloat16 : Kind::kNone;
    case Code::kFloat8:
      if (format.group_size == 0 || block_scales) return Kind::kFloat8;
      return format.scale == ScaleType::kFloat32 || format.scale == ScaleType::kE8M0 ? Kind::kByteGroups : Kind::kNone;
    case Code::kInt8:
      if (format.group_size == 0) return Kind::kInt8;
      return has_half_scales(format) && (!format.mins || format.group_size >= 32) ? Kind::kByteGroups : Kind::kNone;
    case Code::kInt4:
    case Code::kFloat4: return visit_nibble_format(format, [](auto) {}) ? Kind::kNibbles : Kind::kNone;
    default: return Kind::kNone;
  }
}

bool supports(const WeightFormat& format) { return kind_of(format) != Kind::kNone; }

// k of a row whose sum zero points and mins are multiplied with.
uint32_t chunk_k(const WeightFormat& format) { return format.group_size == 16 ? 16 : 32; }

// The sums of every chunk of the rows, where zero points or mins need them.
size_t scratch_bytes(const PanelLayout& layout, uint32_t, uint32_t num_rows) {
  if (!needs_chunk_sums(layout.format)) return 0;
  const size_t sums = size_t{num_rows} * (layout.k_padded / chunk_k(layout.format)) * sizeof(float);
  return (sums + 63) / 64 * 64;
}

struct BFloat16Panels {
  template <int kRows>
  MOEBIUS_INLINE static void multiply(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
    multiply_bfloat16(panel, rows, total);
  }
};

template <Code kCode>
struct BytePanels {
  template <int kRows>
  MOEBIUS_INLINE static void multiply(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
    multiply_bytes<CodeDecoder<kCode>>(panel, rows, total);
  }
};

template <Code kCode, ScaleType kScale>
struct ByteGroupPanels {
  template <int kRows>
  MOEBIUS_INLINE static void multiply(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
    multiply_byte_groups<kCode, kScale>(panel, rows, total);
  }
};

template <class Format>
struct NibblePanels {
  template <int kRows>
  MOEBIUS_INLINE static void multiply(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
    multiply_nibbles<Format>(panel, rows, total);
  }
};

template <class Panels, int kRows>
void run_block(const PanelJob& job, uint32_t row) {
  const auto* const chunk_sums = reinterpret_cast<const float*>(job.work->scratch);
  const size_t chunks = job.panel.k_padded / chunk_k(job.work->layout->format);
  RowBlock<kRows> rows;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const size_t at = row + static_cast<size_t>(r);
    rows.row[r] = static_cast<const uint32_t*>(job.work->rows[at]);
    rows.chunk_sums[r] = chunk_sums + at * chunks;
  }
  __m512 total[kRows];
  Panels::multiply(job.panel, rows, total);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) store_total(job, row + static_cast<uint32_t>(r), total[r]);
}

using BlockFunction = void (*)(const PanelJob& job, uint32_t row);

template <class Panels, int... kRowsMinusOne>
BlockFunction block_of(uint32_t rows, std::integer_sequence<int, kRowsMinusOne...>) {
  static constexpr BlockFunction kTable[] = {run_block<Panels, kRowsMinusOne + 1>...};
  return kTable[rows - 1];
}

BlockFunction block_function(Kind kind, const WeightFormat& format, uint32_t rows) {
  constexpr auto kSizes = std::make_integer_sequence<int, kMaxRows>();
  BlockFunction found = nullptr;
  switch (kind) {
    case Kind::kBFloat16: return block_of<BFloat16Panels>(rows, kSizes);
    case Kind::kFloat8: return block_of<BytePanels<Code::kFloat8>>(rows, kSizes);
    case Kind::kInt8: return block_of<BytePanels<Code::kInt8>>(rows, kSizes);
    case Kind::kByteGroups: {
      constexpr auto kGroupRows = std::make_integer_sequence<int, kMaxByteGroupRows>();
      constexpr auto kInt8 = Code::kInt8;
      constexpr auto kFloat8 = Code::kFloat8;
      switch (format.scale) {
        case ScaleType::kFloat16: return block_of<ByteGroupPanels<kInt8, ScaleType::kFloat16>>(rows, kGroupRows);
        case ScaleType::kBFloat16: return block_of<ByteGroupPanels<kInt8, ScaleType::kBFloat16>>(rows, kGroupRows);
        case ScaleType::kE8M0: return block_of<ByteGroupPanels<kFloat8, ScaleType::kE8M0>>(rows, kGroupRows);
        default: return block_of<ByteGroupPanels<kFloat8, ScaleType::kFloat32>>(rows, kGroupRows);
      }
    }
    case Kind::kNibbles:
      visit_nibble_format(format, [&](auto nibbles) {
        constexpr Code kCode = decltype(nibbles)::kCode;
        if constexpr (kCode == Code::kInt4 || kCode == Code::kFloat4) {
          found = block_of<NibblePanels<decltype(nibbles)>>(rows, std::make_integer_sequence<int, kMaxNibbleRows>());
        }
      });
      break;
    case Kind::kNone: break;
  }
  return found;
}

void sum_chunks(const GemmWork& work, float* target) {
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    const uint16_t* values = static_cast<const uint16_t*>(work.rows[row]);
    for (uint32_t k = 0; k < work.layout->k_padded; k += 32) {
      const __m512 sums = dot(_mm512_setzero_ps(), _mm512_load_si512(values + k), ones);
      if (chunk_k(work.layout->format) == 32) {
        *target++ = _mm512_reduce_add_ps(sums);
        continue;
      }
      *target++ = _mm512_mask_reduce_add_ps(0x00ff, sums);
      *target++ = _mm512_mask_reduce_add_ps(0xff00, sums);
    }
  }
}

uint32_t most_rows(Kind kind) {
  switch (kind) {
    case Kind::kNibbles: return kMaxNibbleRows;
    case Kind::kByteGroups: return kMaxByteGroupRows;
    default: return kMaxRows;
  }
}

// Rows in equal blocks (13 rows are 7 + 6); a panel serves all of them before the next is touched, so weights
// come from memory once.
void run_panel(const PanelJob& job, Kind kind) {
  const uint32_t num_rows = job.work->num_rows;
  const uint32_t most = most_rows(kind);
  uint32_t row = 0;
  for (uint32_t left = num_rows <= most ? 1 : (num_rows + kBlockRows - 1) / kBlockRows; left > 0; --left) {
    const uint32_t rows = (num_rows - row + left - 1) / left;
    block_function(kind, job.work->layout->format, rows)(job, row);
    row += rows;
  }
}

void run(const GemmWork& work) {
  const Kind kind = kind_of(work.layout->format);
  prefetch_first_panel(work);
  if (needs_chunk_sums(work.layout->format)) sum_chunks(work, reinterpret_cast<float*>(work.scratch));
  for (uint32_t index = 0; index < work.num_panels; ++index) run_panel(panel_job(work, index), kind);
}

constexpr GemmKernel kDot{"avx512_bf16_dot", Isa::kAvx512Bf16, RowType::kBFloat16, 0, 0,
                             supports, scratch_bytes, run};
constexpr GemmKernel kSplit{"avx512_bf16_split", Isa::kAvx512Bf16, RowType::kBFloat16, 0, 0,
                               supports_or_expands<supports_split>, scratch_or_expands<no_scratch>,
                               run_or_expands<run_split>, row_bytes_or_expands<split_bytes>,
                               prepare_or_expands<prepare_split>};
constexpr const GemmKernel* kKernels[] = {&kDot, &kSplit};

}  // namespace

GemmKernels gemms_avx512_bf16() { return {kKernels, 2}; }

}  // namespace moebius
