// Products in tiles kept in memory: the loops of products_amx.cc where there is no tile unit. For tests, never chosen.
#include <immintrin.h>

#include "kernels/isa/isa.h"
#include "kernels/product/product.h"

namespace moebius {
namespace {

#include "kernels/product/decode_bf16.inc.h"
#include "kernels/product/widen_scales.inc.h"
#include "kernels/product/amx_tiles_emulated.inc.h"
#include "kernels/product/amx_epilogue.inc.h"
#include "kernels/product/amx_tasks.inc.h"
#include "kernels/product/amx_blocks.inc.h"
#include "kernels/product/amx_scales.inc.h"
#include "kernels/product/amx_sources.inc.h"
#include "kernels/product/amx_split.inc.h"
#include "kernels/product/amx_folded.inc.h"
#include "kernels/product/amx_groups.inc.h"
#include "kernels/product/amx_grouped.inc.h"
#include "kernels/product/amx_group_blocks.inc.h"
#include "kernels/product/amx_grouped_rows.inc.h"
#include "kernels/product/amx_products.inc.h"

constexpr ProductKernel kBFloat16{"amx_emulated_bfloat16", Isa::kAvx512Bf16, RowType::kBFloat16, kBlockRows, 0,
                                  supports_bfloat16, scratch_bytes, run_bfloat16};
constexpr ProductKernel kInt8{"amx_emulated_int8", Isa::kAvx512Bf16, RowType::kInt8, kBlockRows, 0,
                              supports_int8, scratch_bytes, run_int8};
constexpr const ProductKernel* kKernels[] = {&kBFloat16, &kInt8};

}  // namespace

ProductKernels products_amx_emulated() { return {kKernels, 2}; }

}  // namespace moebius
