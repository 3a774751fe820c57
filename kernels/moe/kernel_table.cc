#include "kernels/moe/kernel_table.h"

#include "kernels/isa/isa.h"

namespace moebius {

const KernelTable& kernel_table(Isa isa) {
  if (isa >= Isa::kAvx512) return kernel_table_avx512();
  if (isa == Isa::kAvx2) return kernel_table_avx2();
  return kernel_table_scalar();
}

}  // namespace moebius
