#include "kernels/gemm/registry.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace moebius {
namespace {

GemmKernels gemms_of(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return gemms_scalar();
    case Isa::kAvx2: return gemms_avx2();
    case Isa::kAvx512: return gemms_avx512();
    case Isa::kAvx512Vnni: return gemms_avx512_vnni();
    case Isa::kAvx512Bf16: return gemms_avx512_bf16();
    case Isa::kAmx: return gemms_amx();
  }
  return {nullptr, 0};
}

}  // namespace

std::vector<const GemmKernel*> runnable_gemms() {
  std::vector<const GemmKernel*> found;
  for (Isa isa : supported_isas()) {
    const GemmKernels table = gemms_of(isa);
    found.insert(found.end(), table.kernels, table.kernels + table.count);
  }
  return found;
}

std::vector<const GemmKernel*> find_gemms(Isa isa, const WeightFormat& format, RowType row_type,
                                                bool exact_level) {
  std::vector<const GemmKernel*> found;
  for (int level = static_cast<int>(isa); level >= 0; --level) {
    const GemmKernels table = gemms_of(static_cast<Isa>(level));
    for (size_t i = 0; i < table.count; ++i) {
      const GemmKernel* kernel = table.kernels[i];
      if (kernel->row_type == row_type && kernel->supports(format)) found.push_back(kernel);
    }
    if (exact_level && !found.empty()) break;
  }
  return found;
}

const GemmKernel& gemm_by_name(const char* name, const std::vector<const GemmKernel*>& kernels) {
  std::string allowed;
  for (const GemmKernel* kernel : kernels) {
    if (std::strcmp(kernel->name, name) == 0) return *kernel;
    allowed += (allowed.empty() ? "" : ", ") + std::string(kernel->name);
  }
  throw std::invalid_argument("kernel '" + std::string(name) +
                              "' is unknown or can not run on this machine; allowed: " + allowed);
}

const VectorKernels& vector_kernels(Isa isa) {
  if (isa >= Isa::kAvx512) return vector_kernels_avx512();
  return isa == Isa::kAvx2 ? vector_kernels_avx2() : vector_kernels_scalar();
}

}  // namespace moebius
