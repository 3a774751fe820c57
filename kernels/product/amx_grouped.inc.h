// Products whose groups of k have scales that bfloat16 weights can not take in exactly, of up to 16 rows. Included
// INSIDE an anonymous namespace, after amx_groups.inc.h.
//
// Panel by panel, as weights lie in memory, a chunk of k decoded at a time. Rows are read in place where they are
// equally spaced.

// chunk_steps() may round a chunk up by less than 4 steps, to whole groups.
constexpr size_t chunk_bytes(const Blocking& blocking) { return (blocking.steps + 3) * kTileBytes; }

// Sums, a chunk of rows, and the tiles and scales of a panel.
size_t grouped_scratch_bytes(const PanelLayout& layout, const Blocking& blocking) {
  const size_t scales = size_t{padded_groups(layout)} * kPanelColumns * sizeof(float);
  return sizeof(GroupSums) + 2 * chunk_bytes(blocking) + scales;
}

template <class Source>
class GroupedProduct {
 public:
  GroupedProduct(const ProductWork& work, const Blocking& blocking)
      : work_(work), layout_(*work.layout), source_(layout_), steps_(divide_up(layout_.k, kTileK)),
        group_steps_(layout_.format.group_size / kTileK), chunk_(chunk_steps(steps_, blocking.steps, 4)),
        sums_(*reinterpret_cast<GroupSums*>(work.scratch)), rows_(work.scratch + sizeof(GroupSums)),
        tiles_(rows_ + chunk_bytes(blocking)), scales_(reinterpret_cast<float*>(tiles_ + chunk_bytes(blocking))) {}

  void run() {
    // Rows beyond the last are added too: what lies there must not be denormal, which is slow.
    __builtin_memset(&sums_, 0, sizeof(GroupSums));
    configure_rows(work_.num_rows);
    for (uint32_t panel = 0; panel < work_.num_panels; ++panel) run_panel(panel);
    Tiles::release();
  }

 private:
  const std::byte* panel_at(uint32_t panel) const { return work_.panels + panel * layout_.panel_bytes; }

  void run_panel(uint32_t panel) {
    const ResultBlock result{work_.result + panel * kPanelColumns, work_.result_stride, work_.num_rows};
    column_scales_of_groups(layout_, panel_at(panel), scales_);
    for (uint32_t begin = 0; begin < steps_; begin += chunk_) {
      const uint32_t steps = steps_ - begin < chunk_ ? steps_ - begin : chunk_;
      decode(panel, begin, steps);
      const float* scales = scales_ + begin / group_steps_ * kPanelColumns;
      add_groups({rows_of(begin, steps), tiles_, scales, steps}, group_steps_, sums_, result, begin == 0);
    }
    FloatEnd(work_).finish(result, PanelEnd(layout_, panel_at(panel)), 0);
  }

  // Fetches what the buffer will hold next: the panel's next chunk, or the panel that follows.
  void decode(uint32_t index, uint32_t begin, uint32_t steps) const {
    const std::byte* panel = panel_at(index);
    const uint32_t next = begin + steps;
    const std::byte* next_panel = next < steps_ ? panel : panel_at(index + 1);
    Task task = source_.task({{panel, panel}, 1, begin, steps},
                             {{next_panel, next_panel}, 1, next < steps_ ? next : 0, steps}, tiles_, 1);
    finish_task(task);
  }

  RowBlock rows_of(uint32_t begin, uint32_t steps) const {
    const uint32_t count = work_.num_rows;
    if (work_.row_stride != 0 || count == 1) {
      return {static_cast<const std::byte*>(work_.rows[0]) + begin * 64, work_.row_stride, count, 64};
    }
    for (uint32_t row = 0; row < count; ++row) {
      const std::byte* from = static_cast<const std::byte*>(work_.rows[row]) + begin * 64;
      for (uint32_t step = 0; step < steps; ++step) {
        _mm512_store_si512(rows_ + step * kTileBytes + row * 64, _mm512_load_si512(from + step * 64));
      }
    }
    return {rows_, 64, count, kTileBytes};
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
