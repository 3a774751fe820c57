// Products of row tiles and panel tiles with the sums in tile registers. Included INSIDE an anonymous namespace,
// after a `Tiles`. Tile numbers: sums 0-3, rows 4 and 5, panels 6 and 7.
//
// A tile of rows is 16 rows x 64 bytes, one of a panel 16 lines of 64 bytes: k = 32 in bfloat16, 64 in int8. Both
// advance alike, so only the dot product knows the type.

constexpr uint32_t kTileRows = 16;
constexpr size_t kTileBytes = 1024;

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

// Lines of weights to fetch with every step, for whoever needs them next. A prefetch beyond the panels is
// harmless: it never faults.
struct Ahead {
  const std::byte* first = nullptr;
  const std::byte* second = nullptr;  // of a second panel, or null
  uint32_t lines = 0;                 // per step, of each

  [[gnu::always_inline]] void step() {
    for (uint32_t line = 0; line < lines; ++line) _mm_prefetch(first + 64 * line, kHint);
    first += 64 * lines;
    if (second == nullptr) return;
    for (uint32_t line = 0; line < lines; ++line) _mm_prefetch(second + 64 * line, kHint);
    second += 64 * lines;
  }

 private:
  static constexpr auto kHint = _MM_HINT_T1;
};

struct RowBlock {
  const std::byte* rows;  // first row, at the k where the tiles begin
  size_t stride;          // bytes
  uint32_t count;         // 1..32
};

void zero_sums() {
  Tiles::zero<0>();
  Tiles::zero<1>();
  Tiles::zero<2>();
  Tiles::zero<3>();
}

// Sums 0, 1 (first row tile, panels 0 and 1) and 2, 3 (second row tile) += rows x panels over `steps` tiles.
// kParts: tiles of a panel that meet the same tile of rows (2: high and low parts of float16).
template <class Math, int kParts, int kRowTiles, int kPanels>
void multiply_block(const RowBlock& block, const std::byte* const* panels, uint32_t steps, Ahead ahead) {
  const std::byte* first = block.rows;
  const std::byte* second = block.rows + kTileRows * block.stride;
  const std::byte* panel0 = panels[0];
  const std::byte* panel1 = panels[kPanels - 1];
  for (uint32_t step = 0; step < steps; ++step) {
    Tiles::load<4>(first, block.stride);
    if constexpr (kRowTiles == 2) Tiles::load<5>(second, block.stride);
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
    first += 64;
    second += 64;
    ahead.step();
  }
}

// One panel, its tiles taking turns between sums 0 and 1 (2 and 3): a single sum would wait for itself.
template <class Math, int kParts, int kRowTiles>
void multiply_stream(const RowBlock& block, const std::byte* panel, uint32_t steps, Ahead ahead) {
  const std::byte* first = block.rows;
  const std::byte* second = block.rows + kTileRows * block.stride;
  uint32_t step = 0;
  for (; step + 2 <= steps * kParts; step += 2) {
    Tiles::load<4>(first, block.stride);
    if constexpr (kRowTiles == 2) Tiles::load<5>(second, block.stride);
    Tiles::load<6>(panel, 64);
    Math::template dot<0, 4, 6>();
    if constexpr (kRowTiles == 2) Math::template dot<2, 5, 6>();
    if constexpr (kParts == 1) {
      ahead.step();
      Tiles::load<4>(first + 64, block.stride);
      if constexpr (kRowTiles == 2) Tiles::load<5>(second + 64, block.stride);
    }
    Tiles::load<7>(panel + kTileBytes, 64);
    Math::template dot<1, 4, 7>();
    if constexpr (kRowTiles == 2) Math::template dot<3, 5, 7>();
    ahead.step();
    first += 128 / kParts;
    second += 128 / kParts;
    panel += 2 * kTileBytes;
  }
  if (step < steps * kParts) {
    Tiles::load<4>(first, block.stride);
    if constexpr (kRowTiles == 2) Tiles::load<5>(second, block.stride);
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
