// bfloat16 rows with vdpbf16ps: weights are decoded exactly, sums are float32, group scales multiply the sums.
//
// vdpbf16ps is not two fused multiply-adds: it reads subnormal inputs as zero, flushes subnormal results and
// rounds to nearest even whatever MXCSR says. Only the last bits of sums differ by that.
#include <immintrin.h>

#include <utility>

#include "kernels/isa/isa.h"
#include "kernels/product/product.h"

namespace moebius {
namespace {

#include "kernels/product/decode_bf16.inc.h"
#include "kernels/product/widen_scales.inc.h"
#include "kernels/product/dot_blocks.inc.h"

enum class Kind : int { kBFloat16, kFloat8, kInt8, kInt4, kInt4Zeros, kMxfp4, kNvfp4, kNone };

Kind kind_of(const WeightFormat& format) {
  const bool grouped = format.group_size != 0;
  switch (format.code) {
    case Code::kBFloat16: return grouped ? Kind::kNone : Kind::kBFloat16;
    case Code::kFloat8:
      if (grouped && !(format.panel_scale && format.scale == ScaleType::kFloat32)) return Kind::kNone;
      return Kind::kFloat8;
    case Code::kInt8: return grouped ? Kind::kNone : Kind::kInt8;
    case Code::kInt4:
      if (format.group_size < 32 || format.panel_scale) return Kind::kNone;
      return format.zeros ? Kind::kInt4Zeros : Kind::kInt4;
    case Code::kFloat4:
      if (!grouped || format.panel_scale) return Kind::kNone;
      return format.group_size == 16 ? Kind::kNvfp4 : Kind::kMxfp4;
    case Code::kFloat32:
    case Code::kFloat16: return Kind::kNone;
  }
  return Kind::kNone;
}

bool supports(const WeightFormat& format) { return kind_of(format) != Kind::kNone; }

// Scratch: scales, zero terms, then the sums of every 32 k of the rows.
size_t scales_bytes(const PanelLayout& layout) { return size_t{padded_groups(layout)} * 64; }
size_t zero_terms_bytes(const PanelLayout& layout) { return layout.format.zeros ? scales_bytes(layout) : 0; }

size_t scratch_bytes(const PanelLayout& layout, uint32_t, uint32_t num_rows) {
  const size_t sums = layout.format.zeros ? size_t{num_rows} * (layout.k_padded / 32) * sizeof(float) : 0;
  return scales_bytes(layout) + zero_terms_bytes(layout) + (sums + 63) / 64 * 64;
}

template <Kind kKind, int kRows>
MOEBIUS_INLINE void multiply(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
  if constexpr (kKind == Kind::kBFloat16) multiply_bfloat16(panel, rows, total);
  if constexpr (kKind == Kind::kFloat8) multiply_bytes<CodeDecoder<Code::kFloat8>>(panel, rows, total);
  if constexpr (kKind == Kind::kInt8) multiply_bytes<CodeDecoder<Code::kInt8>>(panel, rows, total);
  if constexpr (kKind == Kind::kInt4) multiply_nibbles<Code::kInt4, 4, false>(panel, rows, total);
  if constexpr (kKind == Kind::kInt4Zeros) multiply_nibbles<Code::kInt4, 4, true>(panel, rows, total);
  if constexpr (kKind == Kind::kMxfp4) multiply_nibbles<Code::kFloat4, 4, false>(panel, rows, total);
  if constexpr (kKind == Kind::kNvfp4) multiply_nibbles<Code::kFloat4, 2, false>(panel, rows, total);
}

struct PanelJob {
  const ProductWork* work;
  Panel panel;
  const float* column_scale;  // null: 1
  const float* bias;          // null: 0
  const float* chunk_sums;    // [num_rows][k_padded / 32]
  float* result;              // of row 0
};

template <Kind kKind, int kRows>
void run_block(const PanelJob& job, uint32_t row) {
  RowBlock<kRows> rows;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    rows.row[r] = static_cast<const uint32_t*>(job.work->rows[row + static_cast<uint32_t>(r)]);
    rows.chunk_sums[r] = job.chunk_sums + (row + static_cast<uint32_t>(r)) * size_t{job.panel.k_padded / 32};
  }
  __m512 total[kRows];
  multiply<kKind>(job.panel, rows, total);
  const __m512 scale = job.column_scale != nullptr ? _mm512_load_ps(job.column_scale) : _mm512_set1_ps(1.0f);
  const __m512 bias = job.bias != nullptr ? _mm512_load_ps(job.bias) : _mm512_setzero_ps();
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    float* target = job.result + (row + static_cast<uint32_t>(r)) * job.work->result_stride;
    _mm512_store_ps(target, _mm512_fmadd_ps(total[r], scale, bias));
  }
}

using BlockFunction = void (*)(const PanelJob& job, uint32_t row);

template <Kind kKind, int... kRowsMinusOne>
BlockFunction block_of(uint32_t rows, std::integer_sequence<int, kRowsMinusOne...>) {
  static constexpr BlockFunction kTable[] = {run_block<kKind, kRowsMinusOne + 1>...};
  return kTable[rows - 1];
}

BlockFunction block_function(Kind kind, uint32_t rows) {
  constexpr auto kSizes = std::make_integer_sequence<int, kMaxRows>();
  constexpr auto kNibbleSizes = std::make_integer_sequence<int, kMaxNibbleRows>();
  switch (kind) {
    case Kind::kBFloat16: return block_of<Kind::kBFloat16>(rows, kSizes);
    case Kind::kFloat8: return block_of<Kind::kFloat8>(rows, kSizes);
    case Kind::kInt8: return block_of<Kind::kInt8>(rows, kSizes);
    case Kind::kInt4: return block_of<Kind::kInt4>(rows, kNibbleSizes);
    case Kind::kInt4Zeros: return block_of<Kind::kInt4Zeros>(rows, kNibbleSizes);
    case Kind::kMxfp4: return block_of<Kind::kMxfp4>(rows, kNibbleSizes);
    case Kind::kNvfp4: return block_of<Kind::kNvfp4>(rows, kNibbleSizes);
    case Kind::kNone: break;
  }
  return nullptr;
}

// 8 - zero: what is missing from sums of (code - 8) is that times the sum of the row.
void make_zero_terms(const PanelLayout& layout, const std::byte* zeros, float* target) {
  for (uint32_t group = 0; group < layout.groups; ++group) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + group * 16));
    const __m512i term = _mm512_sub_epi32(_mm512_set1_epi32(8), _mm512_cvtepu8_epi32(bytes));
    _mm512_store_ps(target + group * 16, _mm512_cvtepi32_ps(term));
  }
  for (uint32_t group = layout.groups; group < padded_groups(layout); ++group) {
    _mm512_store_ps(target + group * 16, _mm512_setzero_ps());
  }
}

void sum_chunks(const ProductWork& work, float* target) {
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    const uint16_t* values = static_cast<const uint16_t*>(work.rows[row]);
    for (uint32_t k = 0; k < work.layout->k_padded; k += 32) {
      *target++ = _mm512_reduce_add_ps(dot(_mm512_setzero_ps(), _mm512_load_si512(values + k), ones));
    }
  }
}

void prepare_panel(const PanelLayout& layout, const std::byte* panel, float* scales, float* zero_terms) {
  if (layout.format.panel_scale) {
    __builtin_memcpy(scales, panel + layout.scales_offset, layout.groups * sizeof(float));
    return;
  }
  widen_scales(layout, panel, scales);
  if (layout.format.zeros) make_zero_terms(layout, panel + layout.zeros_offset, zero_terms);
}

bool has_nibbles(Kind kind) { return kind >= Kind::kInt4; }

// Rows in equal blocks (13 rows are 7 + 6); a panel serves all of them before the next is touched, so weights
// come from memory once.
void run_panel(const PanelJob& job, Kind kind) {
  const uint32_t num_rows = job.work->num_rows;
  const bool one_block = num_rows <= static_cast<uint32_t>(has_nibbles(kind) ? kMaxNibbleRows : kMaxRows);
  uint32_t row = 0;
  for (uint32_t left = one_block ? 1 : (num_rows + kBlockRows - 1) / kBlockRows; left > 0; --left) {
    const uint32_t rows = (num_rows - row + left - 1) / left;
    block_function(kind, rows)(job, row);
    row += rows;
  }
}

void run(const ProductWork& work) {
  const PanelLayout& layout = *work.layout;
  const Kind kind = kind_of(layout.format);
  float* scales = reinterpret_cast<float*>(work.scratch);
  float* zero_terms = reinterpret_cast<float*>(work.scratch + scales_bytes(layout));
  float* chunk_sums = reinterpret_cast<float*>(work.scratch + scales_bytes(layout) + zero_terms_bytes(layout));
  for (size_t ahead = 0; ahead < kPrefetchBytes; ahead += 64) prefetch(work.panels + ahead);
  if (layout.format.zeros) sum_chunks(work, chunk_sums);
  for (uint32_t index = 0; index < work.num_panels; ++index) {
    const std::byte* panel = work.panels + index * layout.panel_bytes;
    const std::byte* next = index + 1 < work.num_panels ? panel + layout.panel_bytes : panel;
    prepare_panel(layout, panel, scales, zero_terms);
    const auto floats_at = [panel](size_t offset) { return reinterpret_cast<const float*>(panel + offset); };
    PanelJob job{};
    job.work = &work;
    job.panel = {panel, layout.k_padded, layout.format.group_size, scales, zero_terms,
                 next + layout.scales_offset, layout.panel_bytes - layout.scales_offset};
    job.column_scale = layout.format.column_scale ? floats_at(layout.column_scale_offset) : nullptr;
    job.bias = layout.has_bias ? floats_at(layout.bias_offset) : nullptr;
    job.chunk_sums = chunk_sums;
    job.result = work.result + index * kPanelColumns;
    run_panel(job, kind);
  }
}

constexpr ProductKernel kDot{"avx512_bf16_dot", Isa::kAvx512Bf16, RowType::kBFloat16, false, 0,
                             supports, scratch_bytes, run};
constexpr const ProductKernel* kKernels[] = {&kDot};

}  // namespace

ProductKernels products_avx512_bf16() { return {kKernels, 1}; }

}  // namespace moebius
