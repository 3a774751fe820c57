// From sums in memory to results: what follows the sum over k. Included INSIDE an anonymous namespace.

// What applies to the 16 columns of a panel after the sum.
struct PanelEnd {
  const float* column_scale;  // [16] or null
  const float* bias;          // [16] or null

  PanelEnd(const PanelLayout& layout, const std::byte* panel)
      : column_scale(layout.format.column_scale ? floats(panel + layout.column_scale_offset) : nullptr),
        bias(layout.has_bias ? floats(panel + layout.bias_offset) : nullptr) {}

  bool empty() const { return column_scale == nullptr && bias == nullptr; }

  // sum * (column_scale * row_scale) + bias: the order of the other instruction sets, so that int8 results agree.
  __m512 apply(__m512 sum, __m512 row_scale) const {
    __m512 scale = row_scale;
    if (column_scale != nullptr) scale = _mm512_mul_ps(scale, _mm512_loadu_ps(column_scale));
    sum = _mm512_mul_ps(sum, scale);
    return bias == nullptr ? sum : _mm512_add_ps(sum, _mm512_loadu_ps(bias));
  }

 private:
  static const float* floats(const std::byte* at) { return reinterpret_cast<const float*>(at); }
};

struct ResultBlock {
  float* first;      // row 0, column 0 of a panel
  size_t stride;     // floats
  uint32_t rows;
  float* at(uint32_t row) const { return first + row * stride; }
};

// float32 sums: nothing to do without column scale and bias.
struct FloatEnd {
  explicit FloatEnd(const GemmWork&) {}
  void finish(const ResultBlock& result, const PanelEnd& end, uint32_t /*first_row*/) const {
    if (end.empty()) return;
    for (uint32_t row = 0; row < result.rows; ++row) {
      _mm512_store_ps(result.at(row), end.apply(_mm512_load_ps(result.at(row)), _mm512_set1_ps(1.0f)));
    }
  }
  static __m512i add(__m512i left, __m512i right) {
    return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right)));
  }
};

// int32 sums lie in the result until the last k: each row brings its scale.
struct Int32End {
  const float* row_scales;

  explicit Int32End(const GemmWork& work) : row_scales(work.row_scales) {}
  void finish(const ResultBlock& result, const PanelEnd& end, uint32_t first_row) const {
    for (uint32_t row = 0; row < result.rows; ++row) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(result.at(row)));
      _mm512_store_ps(result.at(row), end.apply(sum, _mm512_set1_ps(row_scales[first_row + row])));
    }
  }
  static __m512i add(__m512i left, __m512i right) { return _mm512_add_epi32(left, right); }
};

// --- Vector work for the next piece of weights, done a step at a time between the products of this one.
//
// A step is a call, not inlined into the products: one copy of a decoder instead of one per shape of block, and the
// call costs little next to the tile it makes.

constexpr uint32_t kTileRows = 16;
constexpr size_t kTileBytes = 1024;

// Up to two panels over some steps of k.
struct Piece {
  const std::byte* panels[2];  // where they begin, not where the steps do
  uint32_t num_panels;         // 0: nothing left to do
  uint32_t begin;
  uint32_t steps;

  const std::byte* codes(uint32_t p, uint32_t lines_per_step) const {
    return panels[p] + begin * size_t{lines_per_step} * 64;
  }
};

struct Task {
  void (*work)(Task& task) = nullptr;
  const void* source = nullptr;      // of decoding: the Source
  const std::byte* panel = nullptr;  // being decoded
  const std::byte* second_panel = nullptr;
  const std::byte* fetch[2] = {};    // what to fetch next, of each panel
  std::byte* target = nullptr;       // next tile
  uint32_t begin = 0;                // of the piece
  uint32_t steps = 0;                // of k of the piece
  uint32_t lines = 0;                // of fetching: per step
  uint32_t done = 0;
  uint32_t total = 0;                // steps of work
  uint32_t pace = 0;                 // steps of work per step of products, as a 65536th
  uint32_t due = 0;                  // the same, not yet done

  // Once for each step of products. Work is spread evenly over them: lines that are fetched and lines that products
  // read share a few buffers.
  [[gnu::always_inline]] void step() {
    due += pace;
    if (due < 65536) return;
    due -= 65536;
    if (done < total) work(*this);
  }
};

uint32_t pace_of(uint32_t work_steps, uint32_t product_steps) {
  return work_steps < product_steps ? (work_steps * 65536 + product_steps - 1) / product_steps : 65536;
}

void fetch_step(Task& task) {
  for (uint32_t line = 0; line < task.lines; ++line) _mm_prefetch(task.fetch[0] + 64 * line, _MM_HINT_T1);
  task.fetch[0] += 64 * task.lines;
  if (++task.done == task.steps) task.fetch[0] = task.fetch[1];
}

// Fetches a piece, one panel after the other.
Task fetch_task(const Piece& next, uint32_t lines_per_step, uint32_t product_steps) {
  Task task;
  if (next.num_panels == 0) return task;
  task.work = fetch_step;
  task.fetch[0] = next.codes(0, lines_per_step);
  task.fetch[1] = next.codes(next.num_panels - 1, lines_per_step);
  const uint32_t lines = next.steps * lines_per_step;  // of a panel
  task.lines = (lines * next.num_panels + product_steps - 1) / product_steps;
  task.steps = lines / task.lines;
  task.total = task.steps * next.num_panels;
  task.pace = pace_of(task.total, product_steps);
  return task;
}

// One tile of the next piece, and the codes of the same tile of the piece after it.
template <class Source>
[[gnu::noinline]] void decode_step(Task& task) {
  const Source& source = *static_cast<const Source*>(task.source);
  const uint32_t p = task.done >= task.steps ? 1 : 0;
  if (p == 1 && task.done == task.steps) task.panel = task.second_panel;
  const uint32_t step = task.begin + task.done - p * task.steps;
  const std::byte* fetch = task.fetch[p];
  for (uint32_t line = 0; line < Source::kLines; ++line) _mm_prefetch(fetch + 64 * line, _MM_HINT_T1);
  task.fetch[p] += 64 * Source::kLines;
  source.decode(task.panel, step, reinterpret_cast<uint16_t*>(task.target));
  task.target += Source::kParts * kTileBytes;
  ++task.done;
}

template <class Source>
Task decode_task(const Source& source, const Piece& next, const Piece& after_next, std::byte* buffer,
                 uint32_t product_steps) {
  Task task;
  if (next.num_panels == 0) return task;
  const Piece& fetched = after_next.num_panels > 0 ? after_next : next;
  task.work = decode_step<Source>;
  task.source = &source;
  task.panel = next.panels[0];
  task.second_panel = next.panels[next.num_panels - 1];
  task.fetch[0] = fetched.codes(0, Source::kLines);
  task.fetch[1] = fetched.codes(fetched.num_panels - 1, Source::kLines);
  task.target = buffer;
  task.begin = next.begin;
  task.steps = next.steps;
  task.total = next.steps * next.num_panels;
  task.pace = pace_of(task.total, product_steps);
  return task;
}

void finish_task(Task& task) {
  while (task.done < task.total) task.work(task);
}

// --- GEMMs of row tiles and panel tiles with the sums in tile registers. Tile numbers: sums 0-3, rows 4 and 5,
// panels 6 and 7.
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

// Up to 32 rows: row tiles of first_rows and second_rows rows, exactly the number that exists, so that nothing is
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
// vector work for the next piece that runs at the same time as the tile unit.
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
