// A number that tells packed weights from other packed weights; against accidents, not against attackers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace moebius {

// Spreads every bit of a number over all of the result's: the finaliser of MurmurHash3.
constexpr uint64_t spread_bits(uint64_t value) {
  value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCDull;
  value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53ull;
  return value ^ (value >> 33);
}

// Depends on every bit and its place. Four chains, so that multiplications overlap: packing is much slower. `seed`
// says what the bytes are of.
inline uint64_t digest_of(const std::byte* bytes, size_t count, uint64_t seed) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;
  uint64_t chains[4] = {seed, seed + 1, seed + 2, seed + 3};
  size_t at = 0;
  for (; at + sizeof(chains) <= count; at += sizeof(chains)) {
    uint64_t words[4];
    std::memcpy(words, bytes + at, sizeof(words));
    for (int i = 0; i < 4; ++i) chains[i] = std::rotl((chains[i] ^ words[i]) * kOdd, 29);
  }
  uint64_t digest = spread_bits(count ^ seed);
  for (; at < count; ++at) digest = (digest ^ uint64_t(bytes[at])) * kOdd;
  for (const uint64_t chain : chains) digest = spread_bits(digest ^ chain) + chain;
  return spread_bits(digest);
}

}  // namespace moebius
