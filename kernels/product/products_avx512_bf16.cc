#include "kernels/product/product.h"

namespace moebius {

ProductKernels products_avx512_bf16() { return {nullptr, 0}; }

}  // namespace moebius
