// Launches of the kernels above, for ctypes; returns the size of Box, so that its mirror can be checked.
extern "C" unsigned box_bytes() { return sizeof(Box); }

extern "C" void launch_pack(unsigned grid, unsigned block, const Box* box, const u8* hidden_states, const u8* ids,
                            const u8* weights, u32 dtype, u32 slot, u32 layer, u32 rows, u32 begin, u32 count,
                            u32 parts) {
  run_grid(grid, block, [&] {
    pack_and_ring(*box, hidden_states, ids, weights, dtype, slot, layer, rows, begin, count, parts);
  });
}

extern "C" void launch_add(unsigned grid, unsigned block, const Box* box, float* partial, const u8* staged, u32 slot,
                           u32 layer, u32 begin, u32 count, u32 parts) {
  run_grid(grid, block, [&] { wait_and_add(*box, partial, staged, slot, layer, begin, count, parts); });
}

extern "C" u64 launch_ping_pong(u32* word, u32 warm_up, u32 rounds, u64 deadline_ns) {
  u64 nanoseconds = 1;
  run_grid(1, 1, [&] { ping_pong(word, warm_up, rounds, deadline_ns, &nanoseconds); });
  return nanoseconds;
}
