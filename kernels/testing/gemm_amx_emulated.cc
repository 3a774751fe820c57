// GEMMs in tiles kept in memory: the loops of gemm_amx.cc where there is no tile unit. For tests, never chosen.
#include <immintrin.h>

#include "kernels/format/codebooks.h"
#include "kernels/format/grids.h"
#include "kernels/gemm/gemm.h"
#include "kernels/isa/isa.h"

namespace moebius {

GemmKernels gemms_amx_emulated();  // gemm_emulated.h, which has more than declarations of its own

namespace {

#include "kernels/gemm/decode_bf16.inc.h"
#include "kernels/gemm/code_planes.inc.h"
#include "kernels/gemm/decode_small.inc.h"
#include "kernels/gemm/widen_scales.inc.h"
#include "kernels/testing/amx_tiles_emulated.inc.h"
#include "kernels/gemm/amx_blocks.inc.h"
#include "kernels/gemm/amx_sources.inc.h"
#include "kernels/gemm/amx_folded.inc.h"
#include "kernels/gemm/amx_grouped.inc.h"
#include "kernels/gemm/amx_grouped_panels.inc.h"
#include "kernels/gemm/amx_grouped_rows.inc.h"
#include "kernels/gemm/amx_gemms.inc.h"
#include "kernels/gemm/grid_lines.inc.h"
#include "kernels/gemm/grid_gemm.inc.h"

constexpr GemmKernel kBFloat16{"amx_emulated_bfloat16", Isa::kAvx512Bf16, RowType::kBFloat16, kBlockRows, 0,
                               supports_or_expands<supports_bfloat16>, scratch_or_expands<scratch_bytes, false>,
                               run_or_expands<run_bfloat16, false>};
constexpr GemmKernel kInt8{"amx_emulated_int8", Isa::kAvx512Bf16, RowType::kInt8, kBlockRows, 0,
                              supports_int8, scratch_bytes, run_int8};
constexpr GemmKernel kPanels{"amx_emulated_bfloat16_panels", Isa::kAvx512Bf16, RowType::kBFloat16, kPanelsSpacedRows, 0,
                             scales_sums, panels_scratch_bytes, run_bfloat16_panels};
constexpr const GemmKernel* kKernels[] = {&kBFloat16, &kPanels, &kInt8};

}  // namespace

GemmKernels gemms_amx_emulated() { return {kKernels, 3}; }

}  // namespace moebius
