#include "kernels/isa/isa.h"

#include <cpuid.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

namespace moebius {
namespace {

constexpr Isa kAllIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512};

// XCR0: register state the operating system saves. Read by bytes: the intrinsic would need -mxsave.
uint64_t read_xcr0() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool has_bits(uint64_t value, uint64_t mask) { return (value & mask) == mask; }

Isa highest_isa() {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return Isa::kScalar;
  constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28;
  if (!has_bits(ecx, kFma | kOsxsave | kAvx)) return Isa::kScalar;
  const uint64_t xcr0 = read_xcr0();
  if (!has_bits(xcr0, 0x6)) return Isa::kScalar;  // SSE and AVX state
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return Isa::kScalar;
  constexpr uint32_t kAvx2 = 1u << 5;
  if (!has_bits(ebx, kAvx2)) return Isa::kScalar;
  constexpr uint32_t kAvx512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  if (!has_bits(ebx, kAvx512) || !has_bits(xcr0, 0xe6)) return Isa::kAvx2;  // mask and ZMM state
  return Isa::kAvx512;
}

std::string allowed_names() {
  std::string names;
  for (Isa isa : supported_isas()) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  return names;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "unknown";
}

std::vector<Isa> supported_isas() {
  static const Isa highest = highest_isa();
  std::vector<Isa> levels;
  for (Isa isa : kAllIsas) {
    if (isa <= highest) levels.push_back(isa);
  }
  return levels;
}

Isa resolve_isa(std::string_view requested) {
  std::string source = "isa";
  std::string name(requested);
  if (name == "auto") {
    const char* forced = std::getenv("MOEBIUS_ISA");
    if (forced == nullptr || *forced == '\0') return supported_isas().back();
    source = "MOEBIUS_ISA";
    name = forced;
  }
  for (Isa isa : kAllIsas) {
    if (name != isa_name(isa)) continue;
    if (isa <= supported_isas().back()) return isa;
    throw std::invalid_argument(source + "=" + name + " can not run on this machine; allowed: " + allowed_names());
  }
  throw std::invalid_argument(source + "='" + name + "' is unknown; allowed: " + allowed_names());
}

}  // namespace moebius
