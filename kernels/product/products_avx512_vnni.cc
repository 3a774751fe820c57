#include "kernels/product/product.h"

namespace moebius {

ProductKernels products_avx512_vnni() { return {nullptr, 0}; }

}  // namespace moebius
