// The eight tile registers, as static functions with constant tile numbers. Included INSIDE an anonymous
// namespace of gemm_amx.cc; amx_tiles_emulated.inc.h has the same interface for machines without tiles.
// Own assembly instead of the compiler's macros: those take literal numbers only, not template arguments.

// Operand of the instruction that configures tiles (Intel SDM volume 1, 18.3): palette 1, bytes per row and rows
// of each tile.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct Tiles {
  static void configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }

  // Without it the thread's 8 KiB of tiles would be saved and restored at every context switch.
  static void release() { __asm__ volatile("tilerelease"); }

  template <int kTile>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }

  // Rows of the tile from `stride` bytes apart. "memory": what was written there must be there.
  template <int kTile>
  static void load(const void* from, size_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kTile>
  static void store(void* to, size_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
  }

  // kSum[m][n] += sum over k of kRows[m][2 k], [2 k + 1] * kPanel[k][2 n], [2 n + 1], in float32.
  template <int kSum, int kRows, int kPanel>
  static void dot_bfloat16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kPanel));
  }

  // The same over four signed bytes each, in int32.
  template <int kSum, int kRows, int kPanel>
  static void dot_int8() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kPanel));
  }
};
