// GEMMs of some dozen rows whose groups of k are scaled in float32. Included INSIDE an anonymous namespace, after
// amx_grouped.inc.h.
//
// Some panels at a time, a chunk of k at a time, up to 16 rows at a time with their totals in registers: a sum that
// leaves its tile is read once and written once. A chunk of a panel meets all rows, and between these products the
// tiles that come next are made, of codes without a scale: 32 cycles a tile, where scaled weights in two parts take 140
// (llvm-mca's model of Ice Lake), more than the products of 64 rows.

constexpr uint32_t kPanelsChunk = 8;       // steps; a group has at most 4
constexpr uint32_t kPanelsTogether = 2;    // that a chunk of rows meets while it is in L1
constexpr uint32_t kPanelsSpacedRows = 512;  // more are not given at once
constexpr int kSmallTileRows = 12;           // 17 to 24 rows, 33 to 36: totals of fewer rows are added in less time

constexpr size_t kPanelsTileBytes = kPanelsChunk * kTileBytes;  // of a chunk

// Where a GEMM by panels keeps what in its scratch.
struct PanelsScratch {
  // Row tiles are as few as can be and share the rows evenly: 33 are three times 11 and not 16, 16 and 1. All that is
  // done with a tile takes as long as it has rows, and one configuration serves all of them.
  uint32_t row_tiles, tile_rows, steps;
  size_t scale_floats;  // of a panel
  size_t tiles, scales, rows, bytes;

  PanelsScratch(const PanelLayout& layout, uint32_t num_rows)
      : row_tiles(divide_up(num_rows, kTileRows)), tile_rows(divide_up(num_rows, row_tiles)),
        steps(divide_up(layout.k, kTileK)),
        scale_floats(size_t{padded_groups(layout)} * kPanelColumns), tiles(sizeof(GroupSums)),
        scales(tiles + 2 * kPanelsTileBytes), rows(scales + kPanelsTogether * scale_floats * sizeof(float)),
        bytes(rows + size_t{row_tiles} * steps * kTileBytes) {}
};

// The chunk of k of a panel that is multiplied at one time.
struct PanelChunk {
  uint32_t panel, begin;
};

// Makes the tiles of a chunk, a few at a time.
template <class Source>
struct NextTiles {
  const Source* source;
  const std::byte* panel;
  const std::byte* fetch;  // of codes that will be decoded after these
  std::byte* target;
  uint32_t step, left;       // to be decoded
  uint32_t due, of;          // `due` tiles are made during `of` steps of products
  uint32_t credit = 0;

  MOEBIUS_INLINE void step_once() {
#pragma GCC unroll 8
    for (uint32_t line = 0; line < Source::kLines; ++line) _mm_prefetch(fetch + 64 * line, _MM_HINT_T0);
    source->decode(panel, step, reinterpret_cast<uint16_t*>(target));
    fetch += Source::kLines * 64;
    target += kTileBytes;
    ++step;
    --left;
  }

  void finish() {
    while (left > 0) step_once();
  }

  // Once for each step of products.
  MOEBIUS_INLINE void advance() {
    credit += due;
    if (credit < of) return;
    credit -= of;
    if (left > 0) step_once();
  }
};

template <class Source>
struct Interleaving {
  NextTiles<Source>& next;
  MOEBIUS_INLINE void step() const { next.advance(); }
};

template <class Source, int kGroupSteps>
class GroupedPanels {
 public:
  explicit GroupedPanels(const GemmWork& work)
      : work_(work), layout_(*work.layout), source_(layout_), places_(layout_, work.num_rows),
        sums_(*reinterpret_cast<GroupSums*>(work.scratch)) {}

  void run() {
    // Rows beyond a tile's are added too: what lies there must not be denormal, which is slow.
    __builtin_memset(&sums_, 0, sizeof(GroupSums));
    configure_rows(places_.tile_rows);
    pack_rows();
    NextTiles<Source> tiles = next_tiles({0, 0}, 0, 1);
    tiles.finish();
    uint32_t index = 0;
    for (PanelChunk now{0, 0}; now.panel < work_.num_panels; now = after(now), ++index) {
      if (now.begin == 0) widen(now.panel);
      run_chunk(now, index);
      if (now.begin + kPanelsChunk >= places_.steps) finish(now.panel);
    }
    Tiles::release();
  }

 private:
  const std::byte* panel_at(uint32_t panel) const { return work_.panels + panel * layout_.panel_bytes; }
  std::byte* tiles_of(uint32_t index) const { return work_.scratch + places_.tiles + index % 2 * kPanelsTileBytes; }
  float* scales_of(uint32_t panel) const {
    return reinterpret_cast<float*>(work_.scratch + places_.scales) + panel % kPanelsTogether * places_.scale_floats;
  }
  uint32_t steps_of(const PanelChunk& chunk) const { return smaller(kPanelsChunk, places_.steps - chunk.begin); }

  // The next panel of those together, then their next chunk, then the next ones.
  PanelChunk after(const PanelChunk& chunk) const {
    const uint32_t next = chunk.panel + 1;
    if (next % kPanelsTogether != 0 && next < work_.num_panels) return {next, chunk.begin};
    const uint32_t first = chunk.panel / kPanelsTogether * kPanelsTogether, begin = chunk.begin + kPanelsChunk;
    return begin < places_.steps ? PanelChunk{first, begin} : PanelChunk{first + kPanelsTogether, 0};
  }

  // Tiles of a chunk, to be made during the products of the one before it. A chunk later its panel's next codes follow.
  NextTiles<Source> next_tiles(const PanelChunk& chunk, uint32_t index, uint32_t product_steps) const {
    const bool none = chunk.panel >= work_.num_panels;
    const uint32_t steps = none ? 0 : steps_of(chunk);
    const std::byte* panel = panel_at(none ? 0 : chunk.panel);
    return {&source_, panel, fetched(chunk, panel), tiles_of(index), chunk.begin, steps, steps, product_steps};
  }

  const std::byte* fetched(const PanelChunk& chunk, const std::byte* panel) const {
    const uint32_t next = chunk.begin + kPanelsChunk;
    if (next < places_.steps) return panel + size_t{next} * Source::kLines * 64;
    if (chunk.panel + kPanelsTogether < work_.num_panels) return panel_at(chunk.panel + kPanelsTogether);
    return work_.next != nullptr ? work_.next + chunk.panel % kPanelsTogether * layout_.panel_bytes : panel;
  }

  // Scales of a panel, and a request for those of the panels that follow.
  void widen(uint32_t panel) const {
    column_scales_of_groups(layout_, panel_at(panel), scales_of(panel));
    const std::byte* next = panel_at(panel + kPanelsTogether) + layout_.scales_offset;
    const size_t bytes = panel + kPanelsTogether < work_.num_panels ? layout_.panel_bytes - layout_.scales_offset : 0;
    for (size_t at = 0; at < bytes; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
  }

  // A chunk of a panel with all rows.
  void run_chunk(const PanelChunk& now, uint32_t index) const {
    const uint32_t steps = steps_of(now);
    NextTiles<Source> next = next_tiles(after(now), index + 1, steps * places_.row_tiles);
    Interleaving<Source> interleaving{next};
    const float* scales = scales_of(now.panel) + size_t{now.begin / kGroupSteps} * kPanelColumns;
    for (uint32_t tile = 0; tile < places_.row_tiles; ++tile) {
      const uint32_t row = tile * places_.tile_rows;
      const ResultBlock result{work_.result + row * work_.result_stride + now.panel * kPanelColumns,
                               work_.result_stride, smaller(places_.tile_rows, work_.num_rows - row)};
      const GroupWork group{rows_of(tile, now.begin), tiles_of(index), scales, steps};
      if (places_.tile_rows <= kSmallTileRows) {
        GroupBlock<kGroupSteps, kSmallTileRows>(group, sums_).run(result, now.begin == 0, interleaving);
      } else {
        GroupBlock<kGroupSteps, kTileRows>(group, sums_).run(result, now.begin == 0, interleaving);
      }
    }
    next.finish();
  }

  bool is_packed(uint32_t tile) const {
    const bool whole = (tile + 1) * places_.tile_rows <= work_.num_rows;
    return work_.row_stride == 0 || !whole;
  }

  RowBlock rows_of(uint32_t tile, uint32_t begin) const {
    if (is_packed(tile)) {
      const size_t step = size_t{tile} * places_.steps + begin;
      return {work_.scratch + places_.rows + step * kTileBytes, 64, places_.tile_rows, kTileBytes};
    }
    const auto* first = static_cast<const std::byte*>(work_.rows[0]) + size_t{begin} * 64;
    return {first + size_t{tile} * places_.tile_rows * work_.row_stride, work_.row_stride, places_.tile_rows, 64};
  }

  // Rows that are not equally spaced, and the last ones with zeros after them: all tiles have as many rows, because
  // telling the tile unit another number takes as long as a dozen products.
  void pack_rows() const {
    for (uint32_t tile = 0; tile < places_.row_tiles; ++tile) {
      if (!is_packed(tile)) continue;
      for (uint32_t i = 0; i < places_.tile_rows; ++i) {
        const uint32_t row = tile * places_.tile_rows + i;
        const bool exists = row < work_.num_rows;
        const auto* from = static_cast<const std::byte*>(work_.rows[exists ? row : 0]);
        std::byte* to = work_.scratch + places_.rows + size_t{tile} * places_.steps * kTileBytes + i * 64;
        for (uint32_t step = 0; step < places_.steps; ++step) {
          const __m512i values = exists ? _mm512_load_si512(from + step * size_t{64}) : _mm512_setzero_si512();
          _mm512_store_si512(to + step * kTileBytes, values);
        }
      }
    }
  }

  void finish(uint32_t panel) const {
    const ResultBlock result{work_.result + panel * kPanelColumns, work_.result_stride, work_.num_rows};
    FloatEnd(work_).finish(result, PanelEnd(layout_, panel_at(panel)), 0);
  }

  const GemmWork& work_;
  const PanelLayout& layout_;
  Source source_;
  PanelsScratch places_;
  GroupSums& sums_;
};

template <class Source>
void run_grouped_panels(const GemmWork& work) {
  switch (work.layout->format.group_size / kTileK) {
    case 1: return GroupedPanels<Source, 1>(work).run();
    case 2: return GroupedPanels<Source, 2>(work).run();
    default: return GroupedPanels<Source, 4>(work).run();
  }
}
