// Probes of AMX tiles. Everything but the accessor has internal linkage; see probe_kernels.h.
#include <immintrin.h>

#include "kernels/testing/probe_kernels.h"

namespace moebius::probe {
namespace {

constexpr int kRows = 16;
constexpr int kRowBytes = 64;
constexpr int kTiles = 8;
constexpr uint64_t kProducts = 4;  // 2 x 2 result tiles; each waits for itself only every fourth product

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// gcc's tile intrinsics do not say that they read what their pointer leads to: without this the compiler may
// leave out the stores before them.
void write_out(const void* data) { __asm__ volatile("" ::"r"(data) : "memory"); }

// All eight tiles full size: 0 to 3 results, zeroed; 4 and 5 left, 6 and 7 right operands.
void load_tiles(uint8_t left, uint8_t right) {
  TileConfig config;
  for (int i = 0; i < kTiles; ++i) {
    config.row_bytes[i] = kRowBytes;
    config.rows[i] = kRows;
  }
  write_out(&config);
  _tile_loadconfig(&config);
  alignas(64) uint8_t values[kRows * kRowBytes];
  for (uint8_t& value : values) value = left;
  write_out(values);
  _tile_loadd(4, values, kRowBytes);
  _tile_loadd(5, values, kRowBytes);
  for (uint8_t& value : values) value = right;
  write_out(values);
  _tile_loadd(6, values, kRowBytes);
  _tile_loadd(7, values, kRowBytes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

uint64_t fold_and_release() {
  alignas(64) uint64_t values[kRows * kRowBytes / sizeof(uint64_t)];
  _tile_stored(0, values, kRowBytes);
  uint64_t result = values[0];
  _tile_stored(1, values, kRowBytes);
  result ^= values[0];
  _tile_stored(2, values, kRowBytes);
  result ^= values[0];
  _tile_stored(3, values, kRowBytes);
  result ^= values[0];
  _tile_release();
  return result;
}

uint64_t run_bfloat16(uint64_t iterations) {
  load_tiles(0x3f, 0x3a);  // 0x3f3f is 0.75, 0x3a3a is 7e-4 in bfloat16
  for (; iterations != 0; --iterations) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return fold_and_release();
}

uint64_t run_int8(uint64_t iterations) {
  load_tiles(3, 1);
  for (; iterations != 0; --iterations) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  return fold_and_release();
}

constexpr PeakKernel kPeaks[] = {
    {"bfloat16_amx", RowType::kBFloat16, kProducts * 2 * 16 * 16 * 32, run_bfloat16},
    {"int8_amx", RowType::kInt8, kProducts * 2 * 16 * 16 * 64, run_int8}};

}  // namespace

PeakKernels peak_kernels_amx() { return {kPeaks, 2}; }

}  // namespace moebius::probe
