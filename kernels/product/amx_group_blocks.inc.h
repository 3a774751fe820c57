// Blocks of 32 rows and two panels whose groups of k are scaled in float32. Included INSIDE an anonymous namespace,
// after amx_blocks.inc.h.
//
// Four sums leave their tiles after each group. They are added to their totals one block later, between the products
// of that block: the vector units work beside the tile unit, on sums that have long arrived in L1.

constexpr uint32_t kTileFloats = kTileRows * kPanelColumns;
constexpr uint32_t kBlockFloats = 4 * kTileFloats;  // sums of a block: row tile 0 x panels 0 and 1, then row tile 1

// totals[4][16][16] += sum over groups of scales[panel][group][16] * sums[group][4][16][16]
struct PendingSums {
  float* totals;
  const float* scales[2];
  const float* sums;

  // Rows [kFirst, kFirst + kCount) of the 64; kCount is at least 8.
  template <int kGroups, int kFirst, int kCount>
  MOEBIUS_INLINE void add() const {
    constexpr int kRows = kCount < 16 ? kCount : 16;
#pragma GCC unroll 4
    for (int begin = kFirst; begin < kFirst + kCount; begin += kRows) {
      __m512 scale[kGroups];
#pragma GCC unroll 4
      for (int group = 0; group < kGroups; ++group) {
        scale[group] = _mm512_load_ps(scales[begin / 16 % 2] + group * kPanelColumns);
      }
#pragma GCC unroll 16
      for (int row = begin; row < begin + kRows; ++row) {
        __m512 total = _mm512_load_ps(totals + row * kPanelColumns);
#pragma GCC unroll 4
        for (int group = 0; group < kGroups; ++group) {
          const float* sum = sums + group * kBlockFloats + row * kPanelColumns;
          total = _mm512_fmadd_ps(_mm512_load_ps(sum), scale[group], total);
        }
        _mm512_store_ps(totals + row * kPanelColumns, total);
      }
    }
  }
};

// kGroups groups of kGroupSteps tiles. Rows are packed as tiles, those of a row tile one after the other.
template <int kGroupSteps, int kGroups, int kRowTiles, int kPanels>
struct ScaledBlock {
  static constexpr int kSteps = kGroupSteps * kGroups;
  const std::byte* rows;
  const std::byte* panels[2];

  // sums[kGroups][4][16][16] of this block, while those before are added to their totals and `beside.step()` does
  // other vector work.
  template <int kStep = 0, class Beside>
  MOEBIUS_INLINE void run(float* sums, const PendingSums& before, Beside& beside) const {
    if constexpr (kStep % kGroupSteps == 0) zero_sums();
    Tiles::load<4>(rows + kStep * kTileBytes, 64);
    Tiles::load<6>(panels[0] + kStep * kTileBytes, 64);
    Tiles::dot_bfloat16<0, 4, 6>();
    if constexpr (kRowTiles == 2) {
      Tiles::load<5>(rows + (kSteps + kStep) * kTileBytes, 64);
      Tiles::dot_bfloat16<2, 5, 6>();
    }
    if constexpr (kPanels == 2) {
      Tiles::load<7>(panels[1] + kStep * kTileBytes, 64);
      Tiles::dot_bfloat16<1, 4, 7>();
      if constexpr (kRowTiles == 2) Tiles::dot_bfloat16<3, 5, 7>();
    }
    before.template add<kGroups, 64 * kStep / kSteps, 64 / kSteps>();
    beside.step();
    if constexpr (kStep % kGroupSteps == kGroupSteps - 1) store(sums + kStep / kGroupSteps * kBlockFloats);
    if constexpr (kStep + 1 < kSteps) run<kStep + 1>(sums, before, beside);
  }

 private:
  MOEBIUS_INLINE static void store(float* sums) {
    Tiles::store<0>(sums, 64);
    if constexpr (kRowTiles == 2) Tiles::store<2>(sums + 2 * kTileFloats, 64);
    if constexpr (kPanels == 2) Tiles::store<1>(sums + kTileFloats, 64);
    if constexpr (kRowTiles == 2 && kPanels == 2) Tiles::store<3>(sums + 3 * kTileFloats, 64);
  }
};
