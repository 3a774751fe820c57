// Sums of groups of k: they leave their tile and are added to float32 totals, scaled. Included INSIDE an anonymous
// namespace.
//
// A tile register is not renamed: loading or clearing it waits for the product or store that still reads it. So four
// sums take turns, and so do two tiles of rows and two of the panel. A group's sums are stored two groups after its
// product and added two groups after that, from memory, while the tile unit works on later groups.

constexpr uint32_t kStoreAfter = 2;
constexpr uint32_t kAddAfter = 4;
constexpr uint32_t kSumsKept = 4;  // as few as can be: all that a product touches shares the first-level cache

struct GroupSums {
  float sums[kSumsKept][kTileRows][kPanelColumns];
};

struct GroupWork {
  RowBlock rows;        // at most 16
  const std::byte* tiles;
  const float* scales;  // [groups][16], from the first group of the piece on
  uint32_t steps;
};

// A block of rows and a panel over a piece of k. kRows: rows of totals kept in registers.
template <int kGroupSteps, int kRows>
class GroupBlock {
 public:
  GroupBlock(const GroupWork& work, GroupSums& memory)
      : work_(work), memory_(memory), groups_(divide_up(work.steps, kGroupSteps)) {}

  // result (+)= the scaled sums of all groups. interleaved.step() is other vector work, once for each step of k.
  template <class Interleaved>
  MOEBIUS_INLINE void run(const ResultBlock& result, bool first, Interleaved& interleaved) {
    __m512 totals[kRows];
#pragma GCC unroll 16
    for (uint32_t row = 0; row < kRows; ++row) {
      totals[row] = !first && row < result.rows ? _mm512_load_ps(result.at(row)) : _mm512_setzero_ps();
    }
    for (uint32_t group = 0; group < groups_ + kAddAfter; group += 4) {
      turn<0>(group, totals, interleaved);
      turn<1>(group + 1, totals, interleaved);
      turn<2>(group + 2, totals, interleaved);
      turn<3>(group + 3, totals, interleaved);
    }
#pragma GCC unroll 16
    for (uint32_t row = 0; row < kRows; ++row) {
      if (row < result.rows) _mm512_store_ps(result.at(row), totals[row]);
    }
  }

 private:
  template <int kSum, class Interleaved>
  MOEBIUS_INLINE void turn(uint32_t group, __m512 (&totals)[kRows], Interleaved& interleaved) {
    if (group < groups_) {
      multiply<kSum>(group * kGroupSteps);
#pragma GCC unroll 4
      for (int i = 0; i < kGroupSteps; ++i) interleaved.step();
    }
    if (group - kStoreAfter < groups_) {  // wraps around below kStoreAfter
      Tiles::store<(kSum + 4 - kStoreAfter) % 4>(memory_.sums[(group - kStoreAfter) % kSumsKept], 64);
    }
    if (group - kAddAfter < groups_) add(group - kAddAfter, totals);
  }

  template <int kSum>
  MOEBIUS_INLINE void multiply(uint32_t begin) {
    Tiles::zero<kSum>();
#pragma GCC unroll 4
    for (int i = 0; i < kGroupSteps; ++i) {
      if (begin + i >= work_.steps) return;
      (kSum + i) % 2 == 0 ? multiply_step<kSum, 4, 6>(begin + i) : multiply_step<kSum, 5, 7>(begin + i);
    }
  }

  template <int kSum, int kRowTile, int kPanelTile>
  MOEBIUS_INLINE void multiply_step(uint32_t step) {
    Tiles::load<kRowTile>(work_.rows.rows + step * work_.rows.step, work_.rows.stride);
    Tiles::load<kPanelTile>(work_.tiles + step * kTileBytes, 64);
    Tiles::dot_bfloat16<kSum, kRowTile, kPanelTile>();
  }

  MOEBIUS_INLINE void add(uint32_t group, __m512 (&totals)[kRows]) {
    const __m512 scale = _mm512_load_ps(work_.scales + group * kPanelColumns);
    const float(*sums)[kPanelColumns] = memory_.sums[group % kSumsKept];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      totals[row] = _mm512_fmadd_ps(_mm512_load_ps(sums[row]), scale, totals[row]);
    }
  }

  const GroupWork work_;
  GroupSums& memory_;
  const uint32_t groups_;
};

struct NothingInterleaved {
  void step() const {}
};

template <int kGroupSteps>
void add_groups_of_size(const GroupWork& work, GroupSums& memory, const ResultBlock& result, bool first) {
  NothingInterleaved nothing;
  if (result.rows > 4) return GroupBlock<kGroupSteps, 16>(work, memory).run(result, first, nothing);
  GroupBlock<kGroupSteps, 4>(work, memory).run(result, first, nothing);
}

// group_steps: 1, 2 or 4.
void add_groups(const GroupWork& work, uint32_t group_steps, GroupSums& memory, const ResultBlock& result,
                bool first) {
  if (group_steps == 1) return add_groups_of_size<1>(work, memory, result, first);
  if (group_steps == 2) return add_groups_of_size<2>(work, memory, result, first);
  add_groups_of_size<4>(work, memory, result, first);
}

// --- GEMMs whose groups of k have scales that bfloat16 weights can not take in exactly, of up to 16 rows.
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
class GroupedGemm {
 public:
  GroupedGemm(const GemmWork& work, const Blocking& blocking)
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

  const GemmWork& work_;
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
