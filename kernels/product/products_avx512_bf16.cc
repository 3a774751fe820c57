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
#include "kernels/product/dot_nibbles.inc.h"

enum class Kind : int {
  kNone, kBFloat16, kFloat8, kInt8, kInt4, kInt4Float16, kInt4Zeros, kInt4ZerosFloat16, kMxfp4, kNvfp4
};

Kind int4_kind(const WeightFormat& format) {
  if (format.group_size < 32) return Kind::kNone;
  if (format.scale == ScaleType::kBFloat16) return format.zeros ? Kind::kInt4Zeros : Kind::kInt4;
  if (format.scale == ScaleType::kFloat16) return format.zeros ? Kind::kInt4ZerosFloat16 : Kind::kInt4Float16;
  return Kind::kNone;
}

Kind float4_kind(const WeightFormat& format) {
  if (format.scale == ScaleType::kE8M0 && format.group_size >= 32) return Kind::kMxfp4;
  return format.scale == ScaleType::kE4M3 && format.group_size >= 16 ? Kind::kNvfp4 : Kind::kNone;
}

Kind kind_of(const WeightFormat& format) {
  const bool block_scales = format.panel_scale && format.scale == ScaleType::kFloat32;
  if (format.quantised_rows) return Kind::kNone;
  switch (format.code) {
    case Code::kBFloat16: return format.group_size == 0 ? Kind::kBFloat16 : Kind::kNone;
    case Code::kFloat8: return format.group_size == 0 || block_scales ? Kind::kFloat8 : Kind::kNone;
    case Code::kInt8: return format.group_size == 0 ? Kind::kInt8 : Kind::kNone;
    case Code::kInt4: return format.panel_scale ? Kind::kNone : int4_kind(format);
    case Code::kFloat4: return format.panel_scale ? Kind::kNone : float4_kind(format);
    case Code::kFloat32:
    case Code::kFloat16: return Kind::kNone;
  }
  return Kind::kNone;
}

bool supports(const WeightFormat& format) { return kind_of(format) != Kind::kNone; }

// The sums of every 32 k of the rows, where zero points need them.
size_t scratch_bytes(const PanelLayout& layout, uint32_t, uint32_t num_rows) {
  const size_t sums = layout.format.zeros ? size_t{num_rows} * (layout.k_padded / 32) * sizeof(float) : 0;
  return (sums + 63) / 64 * 64;
}

template <Kind kKind, int kRows>
MOEBIUS_INLINE void multiply(const Panel& panel, const RowBlock<kRows>& rows, __m512 (&total)[kRows]) {
  constexpr auto kBf16 = ScaleType::kBFloat16;
  constexpr auto kF16 = ScaleType::kFloat16;
  if constexpr (kKind == Kind::kBFloat16) multiply_bfloat16(panel, rows, total);
  if constexpr (kKind == Kind::kFloat8) multiply_bytes<CodeDecoder<Code::kFloat8>>(panel, rows, total);
  if constexpr (kKind == Kind::kInt8) multiply_bytes<CodeDecoder<Code::kInt8>>(panel, rows, total);
  if constexpr (kKind == Kind::kInt4) multiply_nibbles<NibbleFormat<Code::kInt4, kBf16, 4, false>>(panel, rows, total);
  if constexpr (kKind == Kind::kInt4Float16) {
    multiply_nibbles<NibbleFormat<Code::kInt4, kF16, 4, false>>(panel, rows, total);
  }
  if constexpr (kKind == Kind::kInt4Zeros) {
    multiply_nibbles<NibbleFormat<Code::kInt4, kBf16, 4, true>>(panel, rows, total);
  }
  if constexpr (kKind == Kind::kInt4ZerosFloat16) {
    multiply_nibbles<NibbleFormat<Code::kInt4, kF16, 4, true>>(panel, rows, total);
  }
  if constexpr (kKind == Kind::kMxfp4) {
    multiply_nibbles<NibbleFormat<Code::kFloat4, ScaleType::kE8M0, 4, false>>(panel, rows, total);
  }
  if constexpr (kKind == Kind::kNvfp4) {
    multiply_nibbles<NibbleFormat<Code::kFloat4, ScaleType::kE4M3, 2, false>>(panel, rows, total);
  }
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
    case Kind::kInt4Float16: return block_of<Kind::kInt4Float16>(rows, kNibbleSizes);
    case Kind::kInt4Zeros: return block_of<Kind::kInt4Zeros>(rows, kNibbleSizes);
    case Kind::kInt4ZerosFloat16: return block_of<Kind::kInt4ZerosFloat16>(rows, kNibbleSizes);
    case Kind::kMxfp4: return block_of<Kind::kMxfp4>(rows, kNibbleSizes);
    case Kind::kNvfp4: return block_of<Kind::kNvfp4>(rows, kNibbleSizes);
    case Kind::kNone: break;
  }
  return nullptr;
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

bool has_nibbles(Kind kind) { return kind >= Kind::kInt4; }  // Kind lists them last

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

PanelJob panel_job(const ProductWork& work, uint32_t index) {
  const PanelLayout& layout = *work.layout;
  const std::byte* panel = work.panels + index * layout.panel_bytes;
  const std::byte* end = work.panels + work.num_panels * layout.panel_bytes;
  const std::byte* after = work.next != nullptr ? work.next : panel;
  const std::byte* next = index + 1 < work.num_panels ? panel + layout.panel_bytes : after;
  const auto floats_at = [panel](size_t offset) { return reinterpret_cast<const float*>(panel + offset); };
  PanelJob job{};
  job.work = &work;
  job.panel.codes = panel;
  job.panel.k_padded = layout.k_padded;
  job.panel.group_size = layout.format.group_size;
  job.panel.groups = layout.groups;
  job.panel.scales = panel + layout.scales_offset;
  job.panel.zeros = panel + layout.zeros_offset;
  job.panel.next_tail = next + layout.scales_offset;
  job.panel.tail_bytes = layout.panel_bytes - layout.scales_offset;
  job.panel.end = end;
  job.panel.jump = work.next != nullptr ? work.next - end : 0;
  job.column_scale = layout.format.column_scale ? floats_at(layout.column_scale_offset) : nullptr;
  job.bias = layout.has_bias ? floats_at(layout.bias_offset) : nullptr;
  job.chunk_sums = reinterpret_cast<const float*>(work.scratch);
  job.result = work.result + index * kPanelColumns;
  return job;
}

// What no panel before has asked for. It was, where the thread's last work ended just before this one.
void prefetch_first_panel(const ProductWork& work) {
  const PanelLayout& layout = *work.layout;
  for (size_t at = 0; at < kPrefetchBytes; at += 64) prefetch(work.panels + at);
  for (size_t at = layout.scales_offset; at < layout.panel_bytes; at += 64) prefetch(work.panels + at);
}

void run(const ProductWork& work) {
  const Kind kind = kind_of(work.layout->format);
  prefetch_first_panel(work);
  if (work.layout->format.zeros) sum_chunks(work, reinterpret_cast<float*>(work.scratch));
  for (uint32_t index = 0; index < work.num_panels; ++index) run_panel(panel_job(work, index), kind);
}

constexpr ProductKernel kDot{"avx512_bf16_dot", Isa::kAvx512Bf16, RowType::kBFloat16, 0, 0,
                             supports, scratch_bytes, run};
constexpr const ProductKernel* kKernels[] = {&kDot};

}  // namespace

ProductKernels products_avx512_bf16() { return {kKernels, 1}; }

}  // namespace moebius
