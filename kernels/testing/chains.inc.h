// Independent chains of one instruction, enough of them to hide its latency; included inside the anonymous
// namespace of a file built for one level. Unit provides Register, start(chain), left(), right(),
// step(sum, left, right) and fold(sum).

template <class Unit, int kChains>
uint64_t run_chains(uint64_t iterations) {
  typename Unit::Register sums[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) sums[i] = Unit::start(i);
  typename Unit::Register left = Unit::left();
  typename Unit::Register right = Unit::right();
  // Hidden from the optimiser, which could otherwise compute with known operands.
  __asm__ volatile("" : "+v"(left), "+v"(right));
  for (; iterations != 0; --iterations) {
    // Keeps the two loops in this order and the chains in registers.
    __asm__ volatile("" : "+r"(iterations));
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sums[i] = Unit::step(sums[i], left, right);
  }
  uint64_t result = 0;
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) result ^= Unit::fold(sums[i]);
  return result;
}
