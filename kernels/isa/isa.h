// Which instruction sets this machine and its operating system offer, and which one is used.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moebius {

// Each level includes the ones before it.
enum class Isa : int {
  kScalar = 0,
  kAvx2 = 1,         // AVX2, FMA, F16C
  kAvx512 = 2,       // AVX-512 F, BW, VL, DQ
  kAvx512Vnni = 3,   // + VNNI
  kAvx512Bf16 = 4,   // + BF16, VBMI, GFNI
  kAmx = 5,          // + AMX tile, bf16, int8, with the kernel's permission to use tiles
};

const char* isa_name(Isa isa);  // "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"

// Levels this machine can run, lowest first; always begins with kScalar.
std::vector<Isa> supported_isas();

// The level to use. `requested` is "auto" or a level's name; "auto" takes MOEBIUS_ISA when that is set,
// else the highest supported level. Throws std::invalid_argument naming the value and what is allowed
// when the level is unknown or this machine can not run it.
Isa resolve_isa(std::string_view requested);

}  // namespace moebius
