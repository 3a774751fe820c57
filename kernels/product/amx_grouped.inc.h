// Products whose groups of k have scales that bfloat16 weights can not take in exactly: every group's sum leaves
// its tile and is added to float32 totals, scaled. Included INSIDE an anonymous namespace.
//
// For a block of 16 rows and a panel, totals are 16 vectors in registers over a chunk of k. The sums of one group
// are added while the tile unit works on the next.

// Rows of totals kept in registers: as many as the block has, rounded up to a power of two.
template <int kRows>
struct Totals {
  __m512 row[kRows];

  MOEBIUS_INLINE void load(const ResultBlock& result, bool zero) {
#pragma GCC unroll 16
    for (uint32_t r = 0; r < kRows; ++r) {
      row[r] = !zero && r < result.rows ? _mm512_load_ps(result.at(r)) : _mm512_setzero_ps();
    }
  }
  MOEBIUS_INLINE void store(const ResultBlock& result) const {
#pragma GCC unroll 16
    for (uint32_t r = 0; r < kRows; ++r) {
      if (r < result.rows) _mm512_store_ps(result.at(r), row[r]);
    }
  }
  MOEBIUS_INLINE void add(const float* sums, const float* scales) {
    const __m512 scale = _mm512_load_ps(scales);
#pragma GCC unroll 16
    for (uint32_t r = 0; r < kRows; ++r) {
      row[r] = _mm512_fmadd_ps(_mm512_load_ps(sums + r * kPanelColumns), scale, row[r]);
    }
  }
};

struct GroupChunk {
  RowBlock rows;
  const std::byte* tiles;
  const float* scales;  // of the chunk's first group
  uint32_t steps;
  uint32_t group_steps;
  float* sums;          // [2][16][16], rows beyond the block's zero
};

template <int kSum>
MOEBIUS_INLINE void sum_group(const GroupChunk& chunk, uint32_t group) {
  const uint32_t begin = group * chunk.group_steps;
  const uint32_t end = begin + chunk.group_steps < chunk.steps ? begin + chunk.group_steps : chunk.steps;
  Tiles::zero<kSum>();
  for (uint32_t step = begin; step < end; ++step) {
    Tiles::load<4>(chunk.rows.rows + step * 64, chunk.rows.stride);
    Tiles::load<6>(chunk.tiles + step * kTileBytes, 64);
    Tiles::dot_bfloat16<kSum, 4, 6>();
  }
  Tiles::store<kSum>(chunk.sums + kSum * kTileRows * kPanelColumns, 64);
}

template <int kRows>
void add_groups(const GroupChunk& chunk, const ResultBlock& result, bool first, Ahead ahead) {
  const uint32_t groups = divide_up(chunk.steps, chunk.group_steps);
  const float* other = chunk.sums + kTileRows * kPanelColumns;
  Totals<kRows> totals;
  totals.load(result, first);
  sum_group<0>(chunk, 0);
  uint32_t group = 1;
  for (; group + 2 <= groups; group += 2) {
    sum_group<1>(chunk, group);
    totals.add(chunk.sums, chunk.scales + (group - 1) * kPanelColumns);
    ahead.step();
    sum_group<0>(chunk, group + 1);
    totals.add(other, chunk.scales + group * kPanelColumns);
    ahead.step();
  }
  if (group < groups) {
    sum_group<1>(chunk, group);
    totals.add(chunk.sums, chunk.scales + (group - 1) * kPanelColumns);
    totals.add(other, chunk.scales + group * kPanelColumns);
  } else {
    totals.add(chunk.sums, chunk.scales + (group - 1) * kPanelColumns);
  }
  totals.store(result);
}

void add_groups_of_rows(const GroupChunk& chunk, const ResultBlock& result, bool first, Ahead ahead) {
  if (result.rows > 8) return add_groups<16>(chunk, result, first, ahead);
  if (result.rows > 4) return add_groups<8>(chunk, result, first, ahead);
  if (result.rows > 2) return add_groups<4>(chunk, result, first, ahead);
  if (result.rows > 1) return add_groups<2>(chunk, result, first, ahead);
  add_groups<1>(chunk, result, first, ahead);
}

// chunk_steps() may round a chunk up to whole groups: at most 3 steps.
size_t grouped_scratch_bytes(const PanelLayout& layout, const Blocking& blocking) {
  const size_t steps = blocking.steps > blocking.stream_steps ? blocking.steps : blocking.stream_steps;
  const size_t scales = size_t{padded_groups(layout)} * kPanelColumns * sizeof(float);
  return 2 * kTileBytes + blocking.panels * (scales + (steps + 3) * kTileBytes);
}

template <class Source>
class GroupedProduct {
 public:
  GroupedProduct(const ProductWork& work, const Blocking& blocking)
      : work_(work), layout_(*work.layout), blocking_(blocking), source_(layout_),
        steps_(divide_up(layout_.k, kTileK)), group_steps_(layout_.format.group_size / kTileK),
        few_rows_(work.num_rows <= kTileRows),
        chunk_(chunk_steps(steps_, few_rows_ ? blocking.stream_steps : blocking.steps, group_steps_)),
        sums_(reinterpret_cast<float*>(work.scratch)), scales_(sums_ + 2 * kTileRows * kPanelColumns),
        tiles_(reinterpret_cast<std::byte*>(scales_ +
                                            panels_together() * size_t{padded_groups(layout_)} * kPanelColumns)) {}

  void run() {
    for (size_t i = 0; i < 2 * kTileRows * kPanelColumns; i += 16) _mm512_store_ps(sums_ + i, _mm512_setzero_ps());
    for (uint32_t panel = 0; panel < work_.num_panels; panel += panels_together()) {
      const uint32_t left = work_.num_panels - panel;
      run_panels(panel, left < panels_together() ? left : panels_together());
    }
    Tiles::release();
  }

 private:
  uint32_t panels_together() const { return few_rows_ ? 1 : blocking_.panels; }
  const std::byte* panel_at(uint32_t panel) const { return work_.panels + panel * layout_.panel_bytes; }
  float* scales_of(uint32_t p) const { return scales_ + p * size_t{padded_groups(layout_)} * kPanelColumns; }
  std::byte* tiles_of(uint32_t p) const { return tiles_ + p * size_t{chunk_} * kTileBytes; }

  struct Part {
    uint32_t panel, panels, begin, steps;
  };

  void run_panels(uint32_t panel, uint32_t count) {
    for (uint32_t p = 0; p < count; ++p) column_scales_of_groups(layout_, panel_at(panel + p), scales_of(p));
    for (uint32_t begin = 0; begin < steps_; begin += chunk_) {
      const uint32_t steps = steps_ - begin < chunk_ ? steps_ - begin : chunk_;
      for (uint32_t p = 0; p < count; ++p) source_.tiles(panel_at(panel + p), begin, steps, tiles_of(p));
      run_rows({panel, count, begin, steps});
    }
  }

  void run_rows(const Part& part) {
    const uint32_t blocks = divide_up(work_.num_rows, kTileRows);
    if (blocks > 1) configure_rows(kTileRows);
    for (uint32_t block = 0; block < blocks; ++block) {
      const uint32_t row = block * kTileRows;
      const uint32_t rows = work_.num_rows - row < kTileRows ? work_.num_rows - row : kTileRows;
      if (rows < kTileRows || blocks == 1) configure_rows(rows);
      for (uint32_t p = 0; p < part.panels; ++p) run_block(part, p, row, rows, next_part(part, p, block, blocks));
    }
  }

  void run_block(const Part& part, uint32_t p, uint32_t row, uint32_t rows, const Ahead& ahead) {
    const uint32_t panel = part.panel + p;
    const std::byte* first_row = static_cast<const std::byte*>(work_.rows[0]) + row * work_.row_stride;
    const GroupChunk chunk{{first_row + part.begin * 64, work_.row_stride, rows},
                           tiles_of(p),
                           scales_of(p) + part.begin / group_steps_ * kPanelColumns,
                           part.steps,
                           group_steps_,
                           sums_};
    const ResultBlock result{work_.result + row * work_.result_stride + panel * kPanelColumns, work_.result_stride,
                             rows};
    add_groups_of_rows(chunk, result, part.begin == 0, ahead);
    if (part.begin + part.steps >= steps_) FloatEnd(work_).finish(result, PanelEnd(layout_, panel_at(panel)), row);
  }

  // What this thread reads next, shared out over the blocks of rows; a step of `Ahead` is a group.
  Ahead next_part(const Part& part, uint32_t p, uint32_t block, uint32_t blocks) const {
    const uint32_t of_group = Source::kLines * group_steps_;
    const uint32_t lines = divide_up(of_group, blocks);
    if (block * lines >= of_group) return {};
    const std::byte* next = 
        panel_at(part.panel + p) + (part.begin + part.steps) * Source::kLines * size_t{64};
    if (few_rows_) next += blocking_.ahead_bytes;
    if (!few_rows_ && part.begin + part.steps >= steps_) next = panel_at(part.panel + part.panels + p);
    return {next + size_t{block} * lines * (part.steps / group_steps_) * 64, nullptr, lines};
  }

  const ProductWork& work_;
  const PanelLayout& layout_;
  const Blocking& blocking_;
  Source source_;
  uint32_t steps_;
  uint32_t group_steps_;
  bool few_rows_;
  uint32_t chunk_;
  float* sums_;
  float* scales_;
  std::byte* tiles_;
};
