// Products of row tiles and panel tiles with the sums in tile registers. Included INSIDE an anonymous namespace,
// after a `Tiles`. Tile numbers: sums 0-3, rows 4 and 5, panels 6 and 7.
//
// A tile of rows is 16 rows x 64 bytes, one of a panel 16 lines of 64 bytes: k = 32 in bfloat16, 64 in int8. Both
// advance alike, so only the dot product knows the type.

constexpr auto kAheadHint = _MM_HINT_T0;

struct BFloat16Dot {
  static constexpr uint32_t kStep = 32;  // k of one tile
  template <int kSum, int kRows, int kPanel>
  static void dot() {
    Tiles::dot_bfloat16<kSum, kRows, kPanel>();
  }
};

struct Int8Dot {
  static constexpr uint32_t kStep = 64;
  template <int kSum, int kRows, int kPanel>
  static void dot() {
    Tiles::dot_int8<kSum, kRows, kPanel>();
  }
};

// Up to 32 rows: row tiles of first_rows and second_rows rows, exactly as many as there are, so that nothing is
// read or written beyond them.
TileConfig tile_config(uint32_t first_rows, uint32_t second_rows) {
  TileConfig config{};
  config.palette = 1;
  const uint32_t rows[8] = {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, 16, 16};
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(rows[tile]);
  }
  return config;
}

void configure_rows(uint32_t rows) {
  const uint32_t first = rows < kTileRows ? rows : kTileRows;
  Tiles::configure(tile_config(first, rows > kTileRows ? rows - kTileRows : first));
}

struct RowBlock {
  const std::byte* rows;  // first row, at the k where the tiles begin
  size_t stride;          // bytes
  uint32_t count;         // 1..32
  size_t step = 64;       // bytes from a tile to the next along k
  size_t tile = 0;        // bytes from the first 16 rows to the next 16; 0: 16 times the stride

  const std::byte* second() const { return rows + (tile != 0 ? tile : kTileRows * stride); }
};

void zero_sums() {
  Tiles::zero<0>();
  Tiles::zero<1>();
  Tiles::zero<2>();
  Tiles::zero<3>();
}

// Sums 0, 1 (first row tile, panels 0 and 1) and 2, 3 (second row tile) += rows x panels over `steps` tiles.
// kParts: tiles of a panel that meet the same tile of rows (2: high and low parts of float16). `task.step()` is
// vector work for the next piece (amx_tasks.inc.h) that runs beside the tile unit.
template <class Math, int kParts, int kRowTiles, int kPanels>
void multiply_block(const RowBlock& block, const std::byte* const* panels, uint32_t steps, Task& task) {
  const size_t stride = block.stride;
  const std::byte* first = block.rows;
  const std::byte* second = block.second();
  const std::byte* panel0 = panels[0];
  const std::byte* panel1 = panels[kPanels - 1];
  for (uint32_t step = 0; step < steps; ++step) {
    Tiles::load<4>(first, stride);
    if constexpr (kRowTiles == 2) Tiles::load<5>(second, stride);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Tiles::load<6>(panel0, 64);
      if constexpr (kPanels == 2) Tiles::load<7>(panel1, 64);
      Math::template dot<0, 4, 6>();
      if constexpr (kRowTiles == 2) Math::template dot<2, 5, 6>();
      if constexpr (kPanels == 2) Math::template dot<1, 4, 7>();
      if constexpr (kRowTiles == 2 && kPanels == 2) Math::template dot<3, 5, 7>();
      panel0 += kTileBytes;
      panel1 += kTileBytes;
    }
    first += block.step;
    second += block.step;
    task.step();
  }
}

// How far ahead of up to 32 rows weights are fetched. Beyond the panels that is harmless: a prefetch never faults.
struct Ahead {
  const std::byte* at;
  template <uint32_t kLines>
  [[gnu::always_inline]] void step() {
#pragma GCC unroll 16
    for (uint32_t line = 0; line < kLines; ++line) _mm_prefetch(at + 64 * line, kAheadHint);
    at += 64 * kLines;
  }
};

// One panel, its tiles taking turns between sums 0 and 1 (2 and 3). Tile registers are not renamed: a tile that is
// loaded again waits for the product that reads it, so neighbouring steps use different ones.
template <class Math, int kParts, int kRowTiles, uint32_t kLines>
void multiply_stream(const RowBlock& block, const std::byte* panel, uint32_t steps, Ahead ahead) {
  const size_t stride = block.stride;
  const std::byte* first = block.rows;
  const std::byte* second = block.rows + kTileRows * stride;
  constexpr int kOdd = kRowTiles == 1 ? 5 : 4;  // row tile of odd steps
  uint32_t tile = 0;
  for (; tile + 2 <= steps * kParts; tile += 2) {
    Tiles::load<4>(first, stride);
    if constexpr (kRowTiles == 2) Tiles::load<5>(second, stride);
    Tiles::load<6>(panel, 64);
    Math::template dot<0, 4, 6>();
    if constexpr (kRowTiles == 2) Math::template dot<2, 5, 6>();
    ahead.step<kLines>();
    Tiles::load<7>(panel + kTileBytes, 64);
    if constexpr (kParts == 1) {
      Tiles::load<kOdd>(first + 64, stride);
      if constexpr (kRowTiles == 2) Tiles::load<5>(second + 64, stride);
      ahead.step<kLines>();
    }
    Math::template dot<1, kParts == 1 ? kOdd : 4, 7>();
    if constexpr (kRowTiles == 2) Math::template dot<3, 5, 7>();
    first += 128 / kParts;
    second += 128 / kParts;
    panel += 2 * kTileBytes;
  }
  if (tile < steps * kParts) {
    Tiles::load<4>(first, stride);
    if constexpr (kRowTiles == 2) Tiles::load<5>(second, stride);
    Tiles::load<6>(panel, 64);
    Math::template dot<0, 4, 6>();
    if constexpr (kRowTiles == 2) Math::template dot<2, 5, 6>();
  }
}

// To and from memory; the sums' rows are `result.stride` floats apart.
template <int kRowTiles, int kPanels>
void load_sums(const ResultBlock& result) {
  const size_t stride = result.stride * sizeof(float);
  Tiles::load<0>(result.first, stride);
  if constexpr (kPanels == 2) Tiles::load<1>(result.first + kPanelColumns, stride);
  if constexpr (kRowTiles == 2) Tiles::load<2>(result.at(kTileRows), stride);
  if constexpr (kRowTiles == 2 && kPanels == 2) Tiles::load<3>(result.at(kTileRows) + kPanelColumns, stride);
}

template <int kRowTiles, int kPanels>
void store_sums(const ResultBlock& result) {
  const size_t stride = result.stride * sizeof(float);
  Tiles::store<0>(result.first, stride);
  if constexpr (kPanels == 2) Tiles::store<1>(result.first + kPanelColumns, stride);
  if constexpr (kRowTiles == 2) Tiles::store<2>(result.at(kTileRows), stride);
  if constexpr (kRowTiles == 2 && kPanels == 2) Tiles::store<3>(result.at(kTileRows) + kPanelColumns, stride);
}
