// Which instruction sets this machine and its operating system offer, and which one is used.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moebius {

enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

const char* isa_name(Isa isa);

// Levels this machine can run, lowest first; always begins with kScalar.
std::vector<Isa> supported_isas();

// The level to use. `requested` is "auto" or a level's name; "auto" takes MOEBIUS_ISA when that is set,
// else the highest supported level. Throws std::invalid_argument naming the value and what is allowed
// when the level is unknown or this machine can not run it.
Isa resolve_isa(std::string_view requested);

}  // namespace moebius
