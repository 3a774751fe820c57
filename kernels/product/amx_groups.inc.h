// Sums of groups of k: they leave their tile and are added to float32 totals, scaled. Included INSIDE an anonymous
// namespace.
//
// Two row tiles meet one panel; groups take turns between sums 0, 2 and 1, 3, because a tile register is not renamed:
// while one group's sums are stored, the next group multiplies. Stored sums are collected for a "set" of groups, so
// that totals pass through registers once a set, beside the products of the next one.

// Totals of a block of rows and one panel, and room for the sums of two sets of at most 4 groups.
struct GroupSums {
  float totals[kBlockRows][kPanelColumns];
  float sums[2][4][kBlockRows][kPanelColumns];
};

struct GroupWork {
  RowBlock rows;
  const std::byte* tiles;
  const float* scales;  // [groups][16], from the first group of the piece on
  uint32_t steps;
};

constexpr int groups_in_set(int group_steps) { return group_steps == 1 ? 4 : 2; }

template <int kGroupSteps, int kRowTiles, int kRows>
class GroupBlock {
 public:
  GroupBlock(const GroupWork& work, GroupSums& memory) : work_(work), memory_(memory) {}

  void run(Task& task) {
    const uint32_t sets = divide_up(work_.steps, kGroups * kGroupSteps);
    for (uint32_t set = 0; set < sets; ++set) run_set(set, task);
    store<kGroups - 1>(sets - 1);
    add(sets - 1, 0);
    if constexpr (kRowTiles == 2) add(sets - 1, 1);
  }

 private:
  static constexpr int kGroups = groups_in_set(kGroupSteps);

  void run_set(uint32_t set, Task& task) {
    multiply<0>(set, task);
    if (set > 0) {
      store<kGroups - 1>(set - 1);
      add(set - 1, 0);
    }
    multiply<1>(set, task);
    store<0>(set);
    if constexpr (kGroups == 4) {
      multiply<2>(set, task);
      store<1>(set);
    }
    if constexpr (kRowTiles == 2) {
      if (set > 0) add(set - 1, 1);
    }
    if constexpr (kGroups == 4) {
      multiply<3>(set, task);
      store<2>(set);
    }
  }

  // Groups beyond the end stay zero.
  template <int kGroup>
  MOEBIUS_INLINE void multiply(uint32_t set, Task& task) {
    constexpr int kSum = kGroup % 2;
    Tiles::zero<kSum>();
    if constexpr (kRowTiles == 2) Tiles::zero<kSum + 2>();
    const uint32_t begin = (set * kGroups + kGroup) * kGroupSteps;
#pragma GCC unroll 4
    for (int i = 0; i < kGroupSteps; ++i) {
      if (begin + i >= work_.steps) return;
      (kGroup + i) % 2 == 0 ? multiply_step<kSum, 0>(begin + i) : multiply_step<kSum, 1>(begin + i);
      task.step();
    }
  }

  template <int kSum, int kTurn>
  MOEBIUS_INLINE void multiply_step(uint32_t step) {
    constexpr int kFirst = kRowTiles == 2 ? 4 : 4 + kTurn;
    const std::byte* rows = work_.rows.rows + step * 64;
    Tiles::load<6 + kTurn>(work_.tiles + step * kTileBytes, 64);
    Tiles::load<kFirst>(rows, work_.rows.stride);
    Tiles::dot_bfloat16<kSum, kFirst, 6 + kTurn>();
    if constexpr (kRowTiles == 2) {
      Tiles::load<5>(rows + kTileRows * work_.rows.stride, work_.rows.stride);
      Tiles::dot_bfloat16<kSum + 2, 5, 6 + kTurn>();
    }
  }

  template <int kGroup>
  MOEBIUS_INLINE void store(uint32_t set) {
    constexpr int kSum = kGroup % 2;
    Tiles::store<kSum>(memory_.sums[set % 2][kGroup], 64);
    if constexpr (kRowTiles == 2) Tiles::store<kSum + 2>(memory_.sums[set % 2][kGroup][kTileRows], 64);
  }

  void add(uint32_t set, uint32_t row_tile) {
    float(*totals)[kPanelColumns] = memory_.totals + row_tile * kTileRows;
    __m512 total[kRows];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) total[row] = _mm512_load_ps(totals[row]);
#pragma GCC unroll 4
    for (int group = 0; group < kGroups; ++group) {
      if ((set * kGroups + group) * kGroupSteps >= work_.steps) break;
      const __m512 scale = _mm512_load_ps(work_.scales + (set * kGroups + group) * kPanelColumns);
      const float(*sums)[kPanelColumns] = memory_.sums[set % 2][group] + row_tile * kTileRows;
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        total[row] = _mm512_fmadd_ps(_mm512_load_ps(sums[row]), scale, total[row]);
      }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) _mm512_store_ps(totals[row], total[row]);
  }

  const GroupWork work_;
  GroupSums& memory_;
};

template <int kGroupSteps>
void add_groups_of_size(const GroupWork& work, GroupSums& memory, Task& task) {
  if (work.rows.count > kTileRows) return GroupBlock<kGroupSteps, 2, 16>(work, memory).run(task);
  if (work.rows.count > 4) return GroupBlock<kGroupSteps, 1, 16>(work, memory).run(task);
  GroupBlock<kGroupSteps, 1, 4>(work, memory).run(task);
}

// memory.totals += the scaled sums of all groups of `work`. group_steps: 1, 2 or 4.
void add_groups(const GroupWork& work, uint32_t group_steps, GroupSums& memory, Task& task) {
  if (group_steps == 1) return add_groups_of_size<1>(work, memory, task);
  if (group_steps == 2) return add_groups_of_size<2>(work, memory, task);
  add_groups_of_size<4>(work, memory, task);
}
