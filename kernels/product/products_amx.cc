// Products on the tile unit: bfloat16 rows with every format, int8 rows with quantised ones. See docs/kernels.md.
#include <immintrin.h>

#include "kernels/isa/isa.h"
#include "kernels/product/product.h"

namespace moebius {
namespace {

#include "kernels/product/decode_bf16.inc.h"
#include "kernels/product/widen_scales.inc.h"
#include "kernels/product/amx_tiles.inc.h"
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

constexpr ProductKernel kBFloat16{"amx_bfloat16", Isa::kAmx, RowType::kBFloat16, kBlockRows, 0,
                                  supports_bfloat16, scratch_bytes, run_bfloat16};
constexpr ProductKernel kInt8{"amx_int8", Isa::kAmx, RowType::kInt8, kBlockRows, 0,
                              supports_int8, scratch_bytes, run_int8};
constexpr const ProductKernel* kKernels[] = {&kBFloat16, &kInt8};

}  // namespace

ProductKernels products_amx() { return {kKernels, 2}; }

}  // namespace moebius
