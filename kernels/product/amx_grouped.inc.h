// Products whose groups of k have scales that bfloat16 weights can not take in exactly. Included INSIDE an anonymous
// namespace.
//
// Panels are decoded in pieces that stay in L1 while all blocks of 32 rows pass, the next piece beside them. Few
// rows take panel by panel, as weights lie in memory; many take a chunk of k of all panels, as rows lie in L2.

// sums, two pieces of tiles, and the scales of all panels of a chunk
constexpr size_t grouped_tiles_bytes(const Blocking& blocking) { return 2 * (blocking.steps + 7) * kTileBytes; }

size_t grouped_scratch_bytes(const PanelLayout& layout, const Blocking& blocking, uint32_t num_panels) {
  const size_t scales = size_t{padded_groups(layout)} * kPanelColumns * sizeof(float);
  return sizeof(GroupSums) + grouped_tiles_bytes(blocking) + num_panels * scales;
}

template <class Source>
class GroupedProduct {
 public:
  GroupedProduct(const ProductWork& work, const Blocking& blocking)
      : work_(work), layout_(*work.layout), source_(layout_), steps_(divide_up(layout_.k, kTileK)),
        group_steps_(layout_.format.group_size / kTileK), chunk_(chunk_steps(steps_, blocking.steps, 8)),
        chunks_(divide_up(steps_, chunk_)), panel_first_(work.num_rows <= kBlockRows),
        sums_(*reinterpret_cast<GroupSums*>(work.scratch)), tiles_(work.scratch + sizeof(GroupSums)),
        scales_(reinterpret_cast<float*>(tiles_ + grouped_tiles_bytes(blocking))) {}

  void run() {
    for (uint32_t panel = 0; panel < work_.num_panels; ++panel) {
      column_scales_of_groups(layout_, panel_at(panel), scales_of(panel));
    }
    const uint32_t pieces = chunks_ * work_.num_panels;
    const uint32_t blocks = divide_up(work_.num_rows, kBlockRows);
    Task first = source_.task(piece(0), piece(1), buffer(0), blocks);
    finish_task(first);
    for (uint32_t index = 0; index < pieces; ++index) {
      Task task = source_.task(piece(index + 1), piece(index + 2), buffer(index + 1), blocks);
      run_rows(index, task);
      finish_task(task);
    }
    Tiles::release();
  }

 private:
  const std::byte* panel_at(uint32_t panel) const { return work_.panels + panel * layout_.panel_bytes; }
  float* scales_of(uint32_t panel) const {
    return scales_ + panel * size_t{padded_groups(layout_)} * kPanelColumns;
  }
  std::byte* buffer(uint32_t index) const { return tiles_ + index % 2 * (size_t{chunk_} * kTileBytes); }

  uint32_t panel_of(uint32_t index) const { return panel_first_ ? index / chunks_ : index % work_.num_panels; }

  Piece piece(uint32_t index) const {
    if (index >= chunks_ * work_.num_panels) return {};
    const uint32_t begin = (panel_first_ ? index % chunks_ : index / work_.num_panels) * chunk_;
    const std::byte* panel = panel_at(panel_of(index));
    return {{panel, panel}, 1, begin, steps_ - begin < chunk_ ? steps_ - begin : chunk_};
  }

  void run_rows(uint32_t index, Task& task) {
    const Piece now = piece(index);
    configure_rows(work_.num_rows < kBlockRows ? work_.num_rows : kBlockRows);
    for (uint32_t row = 0; row < work_.num_rows; row += kBlockRows) {
      const uint32_t rows = work_.num_rows - row < kBlockRows ? work_.num_rows - row : kBlockRows;
      if (rows < kBlockRows && row > 0) configure_rows(rows);
      run_block(index, now, row, rows, task);
    }
  }

  void run_block(uint32_t index, const Piece& now, uint32_t row, uint32_t rows, Task& task) {
    const uint32_t panel = panel_of(index);
    const ResultBlock result{work_.result + row * work_.result_stride + panel * kPanelColumns, work_.result_stride,
                             rows};
    load_totals(result, now.begin == 0);
    const std::byte* first_row = static_cast<const std::byte*>(work_.rows[0]) + row * work_.row_stride;
    const GroupWork work{{first_row + now.begin * 64, work_.row_stride, rows},
                         buffer(index),
                         scales_of(panel) + now.begin / group_steps_ * kPanelColumns,
                         now.steps};
    add_groups(work, group_steps_, sums_, task);
    for (uint32_t i = 0; i < rows; ++i) _mm512_store_ps(result.at(i), _mm512_load_ps(sums_.totals[i]));
    if (now.begin + now.steps >= steps_) FloatEnd(work_).finish(result, PanelEnd(layout_, panel_at(panel)), row);
  }

  void load_totals(const ResultBlock& result, bool zero) {
    for (uint32_t row = 0; row < result.rows; ++row) {
      _mm512_store_ps(sums_.totals[row], zero ? _mm512_setzero_ps() : _mm512_load_ps(result.at(row)));
    }
  }

  const ProductWork& work_;
  const PanelLayout& layout_;
  Source source_;
  uint32_t steps_;
  uint32_t group_steps_;
  uint32_t chunk_;
  uint32_t chunks_;
  bool panel_first_;
  GroupSums& sums_;
  std::byte* tiles_;
  float* scales_;
};
