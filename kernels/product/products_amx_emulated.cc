#include "kernels/product/product.h"

namespace moebius {

ProductKernels products_amx_emulated() { return {nullptr, 0}; }

}  // namespace moebius
