#include "kernels/product/registry.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace moebius {
namespace {

ProductKernels products_of(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return products_scalar();
    case Isa::kAvx2: return products_avx2();
    case Isa::kAvx512: return products_avx512();
    case Isa::kAvx512Vnni: return products_avx512_vnni();
    case Isa::kAvx512Bf16: return products_avx512_bf16();
    case Isa::kAmx: return products_amx();
  }
  return {nullptr, 0};
}

// Only by name: emulated tiles show that the loops are right, they are never a choice.
std::vector<const ProductKernel*> runnable_kernels() {
  std::vector<const ProductKernel*> found;
  for (Isa isa : supported_isas()) {
    const ProductKernels table = products_of(isa);
    found.insert(found.end(), table.kernels, table.kernels + table.count);
  }
  if (supported_isas().back() >= Isa::kAvx512Bf16) {
    const ProductKernels emulated = products_amx_emulated();
    found.insert(found.end(), emulated.kernels, emulated.kernels + emulated.count);
  }
  return found;
}

}  // namespace

std::vector<const ProductKernel*> find_products(Isa isa, const WeightFormat& format, RowType row_type,
                                                bool exact_level) {
  std::vector<const ProductKernel*> found;
  for (int level = static_cast<int>(isa); level >= 0; --level) {
    const ProductKernels table = products_of(static_cast<Isa>(level));
    for (size_t i = 0; i < table.count; ++i) {
      const ProductKernel* kernel = table.kernels[i];
      if (kernel->row_type == row_type && kernel->supports(format)) found.push_back(kernel);
    }
    if (exact_level && !found.empty()) break;
  }
  return found;
}

std::vector<const char*> product_names() {
  std::vector<const char*> names;
  for (const ProductKernel* kernel : runnable_kernels()) names.push_back(kernel->name);
  return names;
}

const ProductKernel& product_by_name(const char* name) {
  for (const ProductKernel* kernel : runnable_kernels()) {
    if (std::strcmp(kernel->name, name) == 0) return *kernel;
  }
  std::string allowed;
  for (const char* known : product_names()) allowed += (allowed.empty() ? "" : ", ") + std::string(known);
  throw std::invalid_argument("kernel '" + std::string(name) +
                              "' is unknown or can not run on this machine; allowed: " + allowed);
}

const VectorKernels& vector_kernels(Isa isa) {
  if (isa >= Isa::kAvx512) return vector_kernels_avx512();
  return isa == Isa::kAvx2 ? vector_kernels_avx2() : vector_kernels_scalar();
}

}  // namespace moebius
