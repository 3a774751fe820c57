#include "kernels/probe/probe_registry.h"

#include <stdexcept>

namespace moebius::probe {
namespace {

PeakKernels peaks_of_level(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return peak_kernels_scalar();
    case Isa::kAvx2: return peak_kernels_avx2();
    case Isa::kAvx512: return peak_kernels_avx512();
    case Isa::kAvx512Vnni: return peak_kernels_avx512_vnni();
    case Isa::kAvx512Bf16: return peak_kernels_avx512_bf16();
    case Isa::kAmx: return peak_kernels_amx();
  }
  return {nullptr, 0};
}

}  // namespace

const ReadKernel& read_kernel(Isa isa) {
  if (isa >= Isa::kAvx512) return read_kernel_avx512();
  return isa == Isa::kAvx2 ? read_kernel_avx2() : read_kernel_scalar();
}

std::vector<PeakKernel> peak_kernels(Isa isa) {
  std::vector<PeakKernel> all;
  for (Isa level : supported_isas()) {
    if (level > isa) break;
    const PeakKernels peaks = peaks_of_level(level);
    all.insert(all.end(), peaks.kernels, peaks.kernels + peaks.count);
  }
  return all;
}

PeakKernel peak_kernel(const std::string& name) {
  std::string allowed;
  for (const PeakKernel& kernel : peak_kernels(supported_isas().back())) {
    if (name == kernel.name) return kernel;
    allowed += (allowed.empty() ? "" : ", ") + std::string(kernel.name);
  }
  throw std::invalid_argument("compute unit '" + name + "' is not one of this machine; allowed: " + allowed);
}

}  // namespace moebius::probe
