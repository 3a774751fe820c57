// Sums of groups of k: they leave their tile and are added to float32 totals, scaled. Included INSIDE an anonymous
// namespace.
//
// A tile register is not renamed: loading or clearing it waits for the product or store that still reads it. So four
// sums take turns, and so do two tiles of rows and two of the panel. A group's sums are stored two groups after its
// product and added two groups after that, from memory, while the tile unit works on later groups.

constexpr uint32_t kStoreAfter = 2;
constexpr uint32_t kAddAfter = 4;
constexpr uint32_t kSumsKept = 8;

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

  // result (+)= the scaled sums of all groups.
  void run(const ResultBlock& result, bool first) {
    __m512 totals[kRows];
#pragma GCC unroll 16
    for (uint32_t row = 0; row < kRows; ++row) {
      totals[row] = !first && row < result.rows ? _mm512_load_ps(result.at(row)) : _mm512_setzero_ps();
    }
    for (uint32_t group = 0; group < groups_ + kAddAfter; group += 4) {
      turn<0>(group, totals);
      turn<1>(group + 1, totals);
      turn<2>(group + 2, totals);
      turn<3>(group + 3, totals);
    }
#pragma GCC unroll 16
    for (uint32_t row = 0; row < kRows; ++row) {
      if (row < result.rows) _mm512_store_ps(result.at(row), totals[row]);
    }
  }

 private:
  template <int kSum>
  MOEBIUS_INLINE void turn(uint32_t group, __m512 (&totals)[kRows]) {
    if (group < groups_) multiply<kSum>(group * kGroupSteps);
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

template <int kGroupSteps>
void add_groups_of_size(const GroupWork& work, GroupSums& memory, const ResultBlock& result, bool first) {
  if (result.rows > 4) return GroupBlock<kGroupSteps, 16>(work, memory).run(result, first);
  GroupBlock<kGroupSteps, 4>(work, memory).run(result, first);
}

// group_steps: 1, 2 or 4.
void add_groups(const GroupWork& work, uint32_t group_steps, GroupSums& memory, const ResultBlock& result,
                bool first) {
  if (group_steps == 1) return add_groups_of_size<1>(work, memory, result, first);
  if (group_steps == 2) return add_groups_of_size<2>(work, memory, result, first);
  add_groups_of_size<4>(work, memory, result, first);
}
