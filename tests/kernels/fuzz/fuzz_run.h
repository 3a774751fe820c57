// Runs one case and checks everything about it.
#pragma once

#include "tests/kernels/fuzz/fuzz_case.h"

namespace moebius::fuzz {

// Makes the engine, loads its experts from two threads, computes the request and compares with the golden. Throws
// std::logic_error saying what was wrong.
void run_case(const FuzzCase& fuzz);

}  // namespace moebius::fuzz
