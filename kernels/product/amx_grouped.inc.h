// Products whose groups of k have scales that bfloat16 weights can not take in exactly. Included INSIDE an anonymous
// namespace.
//
// A chunk of k of some panels is decoded; then every block of 16 rows, copied to where its tiles lie close together
// in L1, meets all of them. Few rows take panel by panel, as weights lie in memory, and are read in place.

constexpr uint32_t kPanelsTogether = 1;

// chunk_steps() may round a chunk up by less than 4 steps, to whole groups.
constexpr size_t chunk_bytes(const Blocking& blocking) { return (blocking.steps + 3) * kTileBytes; }

// Sums, a block of rows, tiles and scales of the panels that are computed together.
size_t grouped_scratch_bytes(const PanelLayout& layout, const Blocking& blocking) {
  const size_t scales = size_t{padded_groups(layout)} * kPanelColumns * sizeof(float);
  return sizeof(GroupSums) + chunk_bytes(blocking) + kPanelsTogether * (chunk_bytes(blocking) + scales);
}

template <class Source>
class GroupedProduct {
 public:
  GroupedProduct(const ProductWork& work, const Blocking& blocking)
      : work_(work), layout_(*work.layout), source_(layout_), steps_(divide_up(layout_.k, kTileK)),
        group_steps_(layout_.format.group_size / kTileK), chunk_(chunk_steps(steps_, blocking.steps, 4)),
        sums_(*reinterpret_cast<GroupSums*>(work.scratch)), rows_(work.scratch + sizeof(GroupSums)),
        tiles_(rows_ + chunk_bytes(blocking)),
        scales_(reinterpret_cast<float*>(tiles_ + kPanelsTogether * chunk_bytes(blocking))) {}

  void run() {
    // Rows beyond the last are added too: what lies there must not be denormal, which is slow.
    __builtin_memset(&sums_, 0, sizeof(GroupSums));
    const uint32_t together = work_.num_rows <= kTileRows ? 1 : kPanelsTogether;
    for (uint32_t panel = 0; panel < work_.num_panels; panel += together) {
      const uint32_t left = work_.num_panels - panel;
      run_panels(panel, left < together ? left : together);
    }
    Tiles::release();
  }

 private:
  // Panels [panel, panel + panels), steps [begin, begin + steps).
  struct Chunk {
    uint32_t panel, panels, begin, steps;
  };

  const std::byte* panel_at(uint32_t panel) const { return work_.panels + panel * layout_.panel_bytes; }
  float* scales_of(uint32_t p) const { return scales_ + p * size_t{padded_groups(layout_)} * kPanelColumns; }
  std::byte* tiles_of(uint32_t p) const { return tiles_ + p * size_t{chunk_} * kTileBytes; }

  void run_panels(uint32_t panel, uint32_t panels) {
    for (uint32_t p = 0; p < panels; ++p) column_scales_of_groups(layout_, panel_at(panel + p), scales_of(p));
    for (uint32_t begin = 0; begin < steps_; begin += chunk_) {
      const Chunk chunk{panel, panels, begin, steps_ - begin < chunk_ ? steps_ - begin : chunk_};
      for (uint32_t p = 0; p < panels; ++p) decode(chunk, p);
      run_rows(chunk);
    }
  }

  // Fetches what this place will hold next: the panel's next chunk, or the panel that follows these.
  void decode(const Chunk& chunk, uint32_t p) const {
    const std::byte* panel = panel_at(chunk.panel + p);
    const uint32_t next = chunk.begin + chunk.steps;
    const std::byte* next_panel = next < steps_ ? panel : panel_at(chunk.panel + p + chunk.panels);
    Task task = source_.task({{panel, panel}, 1, chunk.begin, chunk.steps},
                             {{next_panel, next_panel}, 1, next < steps_ ? next : 0, chunk.steps}, tiles_of(p), 1);
    finish_task(task);
  }

  void run_rows(const Chunk& chunk) {
    configure_rows(work_.num_rows < kTileRows ? work_.num_rows : kTileRows);
    for (uint32_t row = 0; row < work_.num_rows; row += kTileRows) {
      const uint32_t rows = work_.num_rows - row < kTileRows ? work_.num_rows - row : kTileRows;
      if (rows < kTileRows && row > 0) configure_rows(rows);
      const RowBlock block = rows_of(chunk, row, rows);
      for (uint32_t p = 0; p < chunk.panels; ++p) run_block(chunk, p, block, row);
    }
  }

  // Rows as contiguous tiles: rows 2^n bytes apart would share few sets of L1.
  RowBlock rows_of(const Chunk& chunk, uint32_t row, uint32_t rows) {
    if (chunk.panels == 1 && (work_.row_stride != 0 || work_.num_rows == 1)) {
      const std::byte* first = static_cast<const std::byte*>(work_.rows[0]) + row * work_.row_stride;
      return {first + chunk.begin * 64, work_.row_stride, rows, 64};
    }
    for (uint32_t i = 0; i < rows; ++i) {
      const std::byte* from = static_cast<const std::byte*>(work_.rows[row + i]) + chunk.begin * 64;
      for (uint32_t step = 0; step < chunk.steps; ++step) {
        const __m512i line = _mm512_load_si512(from + step * 64);
        _mm512_store_si512(rows_ + step * kTileBytes + i * 64, line);
      }
    }
    return {rows_, 64, rows, kTileBytes};
  }

  void run_block(const Chunk& chunk, uint32_t p, const RowBlock& block, uint32_t row) {
    const uint32_t panel = chunk.panel + p;
    const ResultBlock result{work_.result + row * work_.result_stride + panel * kPanelColumns, work_.result_stride,
                             block.count};
    const float* scales = scales_of(p) + chunk.begin / group_steps_ * kPanelColumns;
    add_groups({block, tiles_of(p), scales, chunk.steps}, group_steps_, sums_, result, chunk.begin == 0);
    if (chunk.begin + chunk.steps < steps_) return;
    FloatEnd(work_).finish(result, PanelEnd(layout_, panel_at(panel)), row);
  }

  const ProductWork& work_;
  const PanelLayout& layout_;
  Source source_;
  uint32_t steps_;
  uint32_t group_steps_;
  uint32_t chunk_;
  GroupSums& sums_;
  std::byte* rows_;
  std::byte* tiles_;
  float* scales_;
};
