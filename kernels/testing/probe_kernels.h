// The loops that measure what this machine can do: reading memory, and computing in registers only. One set per
// instruction set; limits measured by them stand next to every figure of `moebius bench kernels`.
//
// This header is read by files built for one instruction set: declarations only, no inline functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gemm/gemm.h"

namespace moebius::probe {

// Where prefetched lines go; the index into ReadKernel::read.
enum class PrefetchHint : uint8_t { kT0 = 0, kT1 = 1, kNta = 2 };
constexpr size_t kPrefetchHints = 3;

constexpr size_t kReadStep = 256;  // bytes; blocks are whole multiples of it

struct ReadWork {
  const std::byte* block;       // 64-byte aligned
  size_t bytes;                 // of the block, a multiple of kReadStep
  const std::byte* next_block;  // prefetched when the distance leads past this block; null: nothing follows
  size_t prefetch_bytes;        // how far ahead, a multiple of kReadStep and at most `bytes`; 0: no prefetch
};

// Loads every byte once, with the widest loads of its level. The result depends on every byte, so that no load
// can be left out.
struct ReadKernel {
  uint64_t (*read[kPrefetchHints])(const ReadWork& work);
};

// `iterations` rounds of independent multiply-add chains in registers. The result depends on every chain.
struct PeakKernel {
  const char* name;         // "<row type>_<level>"
  RowType row_type;         // whose GEMMs this unit could compute
  uint64_t operations;      // multiplications and additions in one iteration
  uint64_t (*run)(uint64_t iterations);
};

struct PeakKernels {
  const PeakKernel* kernels;  // [count]
  size_t count;
};

const ReadKernel& read_kernel_scalar();  // SSE2, part of the baseline
const ReadKernel& read_kernel_avx2();
const ReadKernel& read_kernel_avx512();

PeakKernels peak_kernels_scalar();       // float32 multiplication and addition, SSE
PeakKernels peak_kernels_avx2();         // float32 FMA; int8 by maddubs
PeakKernels peak_kernels_avx512();       // float32 FMA; int8 by maddubs
PeakKernels peak_kernels_avx512_vnni();  // int8 dot product
PeakKernels peak_kernels_avx512_bf16();  // bfloat16 dot product
PeakKernels peak_kernels_amx();          // bfloat16 and int8 tiles

}  // namespace moebius::probe
