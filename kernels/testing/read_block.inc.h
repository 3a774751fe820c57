// The read loop of every level; included inside the anonymous namespace of a file built for that level, which
// provides Register, load(address), merge(a, b) and fold(a). Four lines a step hide the latency of `merge`.

template <int kHint>
void prefetch_step(const std::byte* at) {
#pragma GCC unroll 4
  for (size_t line = 0; line < kReadStep; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(at + line), static_cast<_mm_hint>(kHint));
  }
}

template <int kHint>
uint64_t read_block(const ReadWork& work) {
  constexpr size_t kLoads = kReadStep / sizeof(Register);
  Register sums[4] = {load(work.block), load(work.block), load(work.block), load(work.block)};
  for (size_t at = 0; at < work.bytes; at += kReadStep) {
    const size_t ahead = at + work.prefetch_bytes;
    if (work.prefetch_bytes != 0 && ahead < work.bytes) {
      prefetch_step<kHint>(work.block + ahead);
    } else if (work.prefetch_bytes != 0 && work.next_block != nullptr) {
      prefetch_step<kHint>(work.next_block + (ahead - work.bytes));
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < kLoads; ++i) {
      sums[i % 4] = merge(sums[i % 4], load(work.block + at + i * sizeof(Register)));
    }
  }
  return fold(merge(merge(sums[0], sums[1]), merge(sums[2], sums[3])));
}
