#include "kernels/moe/kernel_table.h"

#include "kernels/isa/isa.h"

namespace moebius {

const KernelTable& kernel_table(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return kernel_table_avx512();
    case Isa::kAvx2: return kernel_table_avx2();
    case Isa::kScalar: break;
  }
  return kernel_table_scalar();
}

}  // namespace moebius
