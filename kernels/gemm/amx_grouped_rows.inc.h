// Blocks of 32 rows and two panels whose groups of k are scaled in float32. Included INSIDE an anonymous namespace,
// after amx_blocks.inc.h.
//
// Four sums leave their tiles after each group. They are added to their totals one block later, between the products
// of that block: the vector units work with the tile unit, on sums that have long arrived in L1.

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

  // sums[kGroups][4][16][16] of this block, while those before are added to their totals and `interleaved.step()` does
  // other vector work.
  template <int kStep = 0, class Interleaved>
  MOEBIUS_INLINE void run(float* sums, const PendingSums& before, Interleaved& interleaved) const {
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
    interleaved.step();
    if constexpr (kStep % kGroupSteps == kGroupSteps - 1) store(sums + kStep / kGroupSteps * kBlockFloats);
    if constexpr (kStep + 1 < kSteps) run<kStep + 1>(sums, before, interleaved);
  }

 private:
  MOEBIUS_INLINE static void store(float* sums) {
    Tiles::store<0>(sums, 64);
    if constexpr (kRowTiles == 2) Tiles::store<2>(sums + 2 * kTileFloats, 64);
    if constexpr (kPanels == 2) Tiles::store<1>(sums + kTileFloats, 64);
    if constexpr (kRowTiles == 2 && kPanels == 2) Tiles::store<3>(sums + 3 * kTileFloats, 64);
  }
};

// --- Grouped GEMMs of more than 16 rows.
//
// Chunks of k are outermost. A chunk of all panels is decoded between the products of the chunk before. A band of up
// to 64 rows is copied to where its tiles lie close together in L1, and meets one pair of panels after the other;
// totals wait in memory until the next chunk.

constexpr uint32_t kBandBlocks = 2;
constexpr uint32_t kMostChunkSteps = 8;
constexpr uint32_t kMostGroupsTogether = 4;

// What a GEMM of many rows keeps in its scratch.
struct RowsScratch {
  uint32_t pairs, blocks;
  size_t scale_floats;  // of a panel: whole chunks
  size_t sums, band, totals, scales, tiles, bytes;

  RowsScratch(const PanelLayout& layout, uint32_t num_panels, uint32_t num_rows)
      : pairs(divide_up(num_panels, 2)), blocks(divide_up(num_rows, kBlockRows)),
        scale_floats((size_t{padded_groups(layout)} + kMostChunkSteps) * kPanelColumns), sums(0),
        band(sums + 2 * kMostGroupsTogether * kBlockFloats * sizeof(float)),
        totals(band + kBandBlocks * 2 * kMostChunkSteps * kTileBytes),
        scales(totals + (size_t{pairs} * blocks + 1) * kBlockFloats * sizeof(float)),
        tiles(scales + size_t{pairs} * 2 * scale_floats * sizeof(float)),
        bytes(tiles + size_t{2} * 2 * pairs * kMostChunkSteps * kTileBytes) {}
};

template <class Source, int kGroupSteps, int kGroups>
class GroupedRows {
  static constexpr uint32_t kSteps = kGroupSteps * kGroups;  // of a chunk
  static constexpr size_t kStepBytes = Source::kLines * size_t{64};  // of packed codes
  static constexpr size_t kBlockBytes = 2 * kSteps * kTileBytes;

 public:
  explicit GroupedRows(const GemmWork& work)
      : work_(work), layout_(*work.layout), source_(layout_), places_(layout_, work.num_panels, work.num_rows),
        steps_(divide_up(layout_.k, kTileK)), sums_(floats(places_.sums)), band_(work.scratch + places_.band),
        totals_(floats(places_.totals)), scales_(floats(places_.scales)) {}

  void run() {
    // Rows beyond the last are added too: what lies there must not be denormal, which is slow.
    __builtin_memset(work_.scratch, 0, places_.scales);
    for (uint32_t p = 0; p < work_.num_panels; ++p) widen(p);
    pending_ = {totals_of(places_.blocks, 0), {scales_, scales_}, sums_};  // zeros, added to an unused place
    start_decoding(0);
    finish_decoding();
    for (uint32_t begin = 0; begin < steps_; begin += kSteps) {
      start_decoding(begin + kSteps);
      for (uint32_t block = 0; block < places_.blocks;) block += run_band(begin, block);
      finish_decoding();
    }
    pending_.template add<kGroups, 0, 64>();
    Tiles::release();
    finish();
  }

  // Interleaved with the GEMM of a step: tiles of the next chunk, evenly spread, and the next rows.
  MOEBIUS_INLINE void step() {
    credit_ += tiles_due_;
    while (credit_ >= steps_due_) {
      credit_ -= steps_due_;
      decode_one();
    }
    fetch_rows();
  }

 private:
  float* floats(size_t offset) const { return reinterpret_cast<float*>(work_.scratch + offset); }
  const std::byte* panel_at(uint32_t panel) const { return work_.panels + panel * layout_.panel_bytes; }
  float* scales_of(uint32_t p) const { return scales_ + p * places_.scale_floats; }
  std::byte* tiles_of(uint32_t begin, uint32_t p) const {
    const uint32_t odd = begin / kSteps % 2;
    return work_.scratch + places_.tiles + (size_t{odd} * 2 * places_.pairs + p) * kSteps * kTileBytes;
  }
  float* totals_of(uint32_t block, uint32_t pair) const {
    return totals_ + (size_t{block} * places_.pairs + pair) * kBlockFloats;
  }
  uint32_t rows_of(uint32_t block) const {
    const uint32_t left = work_.num_rows - block * kBlockRows;
    return left < kBlockRows ? left : kBlockRows;
  }
  const std::byte* row_at(uint32_t row, uint32_t step) const {
    return static_cast<const std::byte*>(work_.rows[row]) + step * 64;
  }

  void widen(uint32_t p) const {
    float* scales = scales_of(p);
    column_scales_of_groups(layout_, panel_at(p), scales);
    const size_t known = size_t{padded_groups(layout_)} * kPanelColumns;
    __builtin_memset(scales + known, 0, (places_.scale_floats - known) * sizeof(float));
  }

  void start_decoding(uint32_t begin) {
    decode_begin_ = begin;
    decode_panel_ = decode_step_ = 0;
    credit_ = 0;
    tiles_due_ = begin < steps_ ? work_.num_panels * kSteps : 0;
    steps_due_ = places_.blocks * places_.pairs * kSteps;
  }

  void finish_decoding() {
    if (tiles_due_ == 0) return;
    while (decode_panel_ < work_.num_panels) decode_one();
  }

  // A tile, and the codes of the same tile of the chunk after: of the panels that follow, after the last chunk.
  [[gnu::noinline]] void decode_one() {
    if (decode_panel_ == work_.num_panels) return;
    const uint32_t step = decode_begin_ + decode_step_;
    const std::byte* panel = panel_at(decode_panel_);
    const uint32_t next = step + kSteps;
    const std::byte* ahead = next < steps_ ? panel + next * kStepBytes
                                           : panel_at(decode_panel_ + work_.num_panels) + decode_step_ * kStepBytes;
    for (uint32_t line = 0; line < Source::kLines; ++line) _mm_prefetch(ahead + 64 * line, _MM_HINT_T1);
    std::byte* tile = tiles_of(decode_begin_, decode_panel_) + decode_step_ * kTileBytes;
    if (step < steps_) {
      source_.decode(panel, step, reinterpret_cast<uint16_t*>(tile));
    } else {
      __builtin_memset(tile, 0, kTileBytes);
    }
    if (++decode_step_ < kSteps) return;
    decode_step_ = 0;
    ++decode_panel_;
  }

  // Computes one or two blocks; two share the tiles of a pair while these are in L1.
  uint32_t run_band(uint32_t begin, uint32_t block) {
    const uint32_t rows = rows_of(block);
    const bool two = kBandBlocks == 2 && block + 1 < places_.blocks && rows_of(block + 1) == kBlockRows;
    const uint32_t blocks = two ? 2 : 1;
    for (uint32_t i = 0; i < blocks; ++i) pack(begin, block + i, band_ + i * kBlockBytes);
    start_fetching(begin, block + blocks);
    configure_rows(rows);
    for (uint32_t pair = 0; pair < places_.pairs; ++pair) {
      const bool whole = pair * 2 + 1 < work_.num_panels;
      for (uint32_t i = 0; i < blocks; ++i) {
        const Place place{begin, block + i, pair, band_ + i * kBlockBytes};
        if (rows > kTileRows) {
          whole ? run_block<2, 2>(place) : run_block<2, 1>(place);
        } else {
          whole ? run_block<1, 2>(place) : run_block<1, 1>(place);
        }
      }
    }
    return blocks;
  }

  struct Place {
    uint32_t begin, block, pair;
    const std::byte* rows;
  };

  template <int kRowTiles, int kPanels>
  void run_block(const Place& place) {
    const uint32_t panel = 2 * place.pair, second = panel + kPanels - 1;
    const ScaledBlock<kGroupSteps, kGroups, kRowTiles, kPanels> block{
        place.rows, {tiles_of(place.begin, panel), tiles_of(place.begin, second)}};
    float* sums = pending_.sums == sums_ ? sums_ + kGroups * kBlockFloats : sums_;
    const PendingSums before = pending_;
    block.run(sums, before, *this);
    const size_t group = size_t{place.begin / kGroupSteps} * kPanelColumns;
    pending_ = {totals_of(place.block, place.pair), {scales_of(panel) + group, scales_of(second) + group}, sums};
  }

  // A block's part of a chunk as tiles: rows 2^n bytes apart would share few sets of L1.
  void pack(uint32_t begin, uint32_t block, std::byte* tiles) const {
    const uint32_t known = steps_ - begin < kSteps ? steps_ - begin : kSteps;
    for (uint32_t row = 0; row < rows_of(block); ++row) {
      const std::byte* from = row_at(block * kBlockRows + row, begin);
      std::byte* line = tiles + row / kTileRows * (kSteps * kTileBytes) + row % kTileRows * 64;
      for (uint32_t step = 0; step < kSteps; ++step) {
        const __m512i values = step < known ? _mm512_load_si512(from + step * 64) : _mm512_setzero_si512();
        _mm512_store_si512(line + step * kTileBytes, values);
      }
    }
  }

  // The rows that pack() will read next.
  void start_fetching(uint32_t begin, uint32_t block) {
    if (block >= places_.blocks) {
      block = 0;
      begin += kSteps;
    }
    fetch_row_ = work_.rows + block * kBlockRows;
    fetch_step_ = begin;
    const uint32_t left = work_.num_rows - block * kBlockRows;
    fetch_left_ = begin < steps_ ? (left < kBandBlocks * kBlockRows ? left : kBandBlocks * kBlockRows) : 0;
  }

  MOEBIUS_INLINE void fetch_rows() {
    if (fetch_left_ == 0) return;
#pragma GCC unroll 8
    for (uint32_t step = 0; step < kSteps; ++step) {
      _mm_prefetch(static_cast<const std::byte*>(*fetch_row_) + (fetch_step_ + step) * 64, kAheadHint);
    }
    ++fetch_row_;
    --fetch_left_;
  }

  void finish() const {
    const FloatEnd end(work_);
    for (uint32_t block = 0; block < places_.blocks; ++block) {
      for (uint32_t p = 0; p < work_.num_panels; ++p) {
        float* first = work_.result + size_t{block} * kBlockRows * work_.result_stride + p * kPanelColumns;
        const ResultBlock result{first, work_.result_stride, rows_of(block)};
        const float* totals = totals_of(block, p / 2) + p % 2 * kTileFloats;
        for (uint32_t row = 0; row < result.rows; ++row) {
          const float* total = totals + row / kTileRows * 2 * kTileFloats + row % kTileRows * kPanelColumns;
          _mm512_store_ps(result.at(row), _mm512_load_ps(total));
        }
        end.finish(result, PanelEnd(layout_, panel_at(p)), block * kBlockRows);
      }
    }
  }

  const GemmWork& work_;
  const PanelLayout& layout_;
  Source source_;
  RowsScratch places_;
  uint32_t steps_;
  float* sums_;
  std::byte* band_;
  float* totals_;
  float* scales_;
  PendingSums pending_;
  uint32_t decode_begin_, decode_panel_, decode_step_;  // the tile to be decoded next
  uint32_t credit_, tiles_due_, steps_due_;             // tiles_due_ tiles in steps_due_ steps
  const void* const* fetch_row_ = nullptr;
  uint32_t fetch_step_ = 0;
  uint32_t fetch_left_ = 0;
};

template <class Source>
void run_grouped_rows(const GemmWork& work) {
  switch (work.layout->format.group_size / kTileK) {
    case 1: return GroupedRows<Source, 1, 2>(work).run();
    case 2: return GroupedRows<Source, 2, 1>(work).run();
    default: return GroupedRows<Source, 4, 1>(work).run();
  }
}
