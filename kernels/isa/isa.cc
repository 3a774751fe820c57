#include "kernels/isa/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

namespace moebius {
namespace {

constexpr Isa kAllIsas[] = {Isa::kScalar,     Isa::kAvx2,       Isa::kAvx512,
                            Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAmx};

// XCR0: register state the operating system saves. Read by bytes: the intrinsic would need -mxsave.
uint64_t read_xcr0() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

constexpr uint64_t bit(int index) { return uint64_t{1} << index; }
bool has_bits(uint64_t value, uint64_t mask) { return (value & mask) == mask; }

// Tiles are 8 KiB of state a thread: Linux hands them out on request only, once for the whole process.
bool tiles_permitted() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

struct CpuidLeaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  CpuidLeaf(uint32_t leaf, uint32_t subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

Isa highest_isa() {
  const CpuidLeaf basic(1, 0);
  constexpr uint64_t kFma = bit(12), kOsxsave = bit(27), kAvx = bit(28), kF16c = bit(29);
  if (!has_bits(basic.ecx, kFma | kOsxsave | kAvx | kF16c)) return Isa::kScalar;
  const uint64_t xcr0 = read_xcr0();
  if (!has_bits(xcr0, 0x6)) return Isa::kScalar;  // SSE and AVX state
  const CpuidLeaf extended(7, 0);
  if (!has_bits(extended.ebx, bit(5))) return Isa::kScalar;
#ifdef MOEBIUS_EMULATE_AVX512
  return Isa::kAvx512Bf16;
#endif
  constexpr uint64_t kAvx512 = bit(16) | bit(17) | bit(30) | bit(31);  // F, DQ, BW, VL
  if (!has_bits(extended.ebx, kAvx512) || !has_bits(xcr0, 0xe6)) return Isa::kAvx2;  // mask and ZMM state
  if (!has_bits(extended.ecx, bit(11))) return Isa::kAvx512;
  const CpuidLeaf more(7, 1);
  constexpr uint64_t kVbmiAndGfni = bit(1) | bit(8);
  if (!has_bits(more.eax, bit(5)) || !has_bits(extended.ecx, kVbmiAndGfni)) return Isa::kAvx512Vnni;  // BF16
  constexpr uint64_t kAmxBits = bit(22) | bit(24) | bit(25);  // bf16, tile, int8
  constexpr uint64_t kTileState = bit(17) | bit(18);
  const bool tiles = has_bits(extended.edx, kAmxBits) && has_bits(xcr0, kTileState) && tiles_permitted();
  return tiles ? Isa::kAmx : Isa::kAvx512Bf16;
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
    case Isa::kAvx512Vnni: return "avx512_vnni";
    case Isa::kAvx512Bf16: return "avx512_bf16";
    case Isa::kAmx: return "amx";
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
