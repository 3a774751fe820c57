// Products whose tiles need no group scales: sums stay in tile registers over as much of k as possible. Included
// INSIDE an anonymous namespace.
//
// A `Source` turns panels into tiles:
//   kParts                       tiles per step of k (2: the high and the low part of float16)
//   kLines                       64-byte lines of packed codes per step
//   kDecodes                     whether tiles are made in a buffer, or are the packed codes themselves
//   tiles(panel, begin, steps, buffer)   the tiles of steps [begin, begin + steps); buffer: kParts KiB a step

constexpr uint32_t kBlockRows = 2 * kTileRows;

struct Blocking {
  uint32_t panels;         // computed together while a block of rows lies in L1
  uint32_t steps;          // of k decoded together: panels * steps KiB should stay in L2
  uint32_t stream_steps;   // the same for up to 32 rows: one panel, L1
  uint32_t ahead_bytes;    // how far ahead weights are fetched when up to 32 rows stream them
};

uint32_t divide_up(uint32_t value, uint32_t by) { return (value + by - 1) / by; }

// Equal chunks of at most `limit`, each a multiple of `unit`.
uint32_t chunk_steps(uint32_t steps, uint32_t limit, uint32_t unit) {
  const uint32_t chunks = divide_up(steps, limit);
  return divide_up(divide_up(steps, chunks), unit) * unit;
}

template <class Math, class End, class Source>
class FoldedProduct {
 public:
  FoldedProduct(const ProductWork& work, const Blocking& blocking)
      : work_(work), blocking_(blocking), source_(*work.layout), end_(work),
        steps_(divide_up(work.layout->k, Math::kStep)) {}

  void run() {
    if (work_.num_rows <= kBlockRows) {
      configure_rows(work_.num_rows);
      for (uint32_t panel = 0; panel < work_.num_panels; ++panel) {
        if (work_.num_rows <= kTileRows) {
          stream_panel<1>(panel);
        } else {
          stream_panel<2>(panel);
        }
      }
    } else {
      for (uint32_t panel = 0; panel < work_.num_panels; panel += blocking_.panels) {
        const uint32_t left = work_.num_panels - panel;
        run_panels(panel, left < blocking_.panels ? left : blocking_.panels);
      }
    }
    Tiles::release();
  }

 private:
  const std::byte* panel_at(uint32_t panel) const { return work_.panels + panel * work_.layout->panel_bytes; }

  RowBlock rows_at(uint32_t row, uint32_t count, uint32_t step) const {
    const std::byte* first = static_cast<const std::byte*>(work_.rows[0]);
    return {first + row * work_.row_stride + step * 64, work_.row_stride, count};
  }

  ResultBlock result_at(uint32_t row, uint32_t count, uint32_t panel) const {
    return {work_.result + row * work_.result_stride + panel * kPanelColumns, work_.result_stride, count};
  }

  template <int kRowTiles>
  void stream_panel(uint32_t panel) {
    zero_sums();
    const std::byte* codes = panel_at(panel);
    const uint32_t chunk = Source::kDecodes ? blocking_.stream_steps : steps_;
    for (uint32_t begin = 0; begin < steps_; begin += chunk) {
      const uint32_t steps = steps_ - begin < chunk ? steps_ - begin : chunk;
      const Ahead ahead{codes + begin * Source::kLines * 64 + blocking_.ahead_bytes, nullptr, Source::kLines};
      const std::byte* tiles = source_.tiles(codes, begin, steps, work_.scratch);
      multiply_stream<Math, Source::kParts, kRowTiles>(rows_at(0, work_.num_rows, begin), tiles, steps, ahead);
    }
    finish_stream<kRowTiles>(panel);
  }

  // Adds the two sums of each row tile.
  template <int kRowTiles>
  void finish_stream(uint32_t panel) {
    alignas(64) float other[kBlockRows][kPanelColumns];
    const ResultBlock result = result_at(0, work_.num_rows, panel);
    Tiles::store<0>(result.first, work_.result_stride * sizeof(float));
    Tiles::store<1>(other, 64);
    if constexpr (kRowTiles == 2) {
      Tiles::store<2>(result.at(kTileRows), work_.result_stride * sizeof(float));
      Tiles::store<3>(other[kTileRows], 64);
    }
    for (uint32_t row = 0; row < result.rows; ++row) {
      const __m512i sum = End::add(_mm512_load_si512(result.at(row)), _mm512_load_si512(other[row]));
      _mm512_store_si512(result.at(row), sum);
    }
    end_.finish(result, PanelEnd(*work_.layout, panel_at(panel)), 0);
  }

  void run_panels(uint32_t panel, uint32_t count) {
    const uint32_t chunk = chunk_steps(steps_, blocking_.steps, 1);
    for (uint32_t begin = 0; begin < steps_; begin += chunk) {
      const uint32_t steps = steps_ - begin < chunk ? steps_ - begin : chunk;
      const std::byte* tiles[kMaxPanels];
      for (uint32_t p = 0; p < count; ++p) {
        tiles[p] = source_.tiles(panel_at(panel + p), begin, steps,
                                 work_.scratch + p * chunk * Source::kParts * kTileBytes);
      }
      run_rows({panel, count, begin, steps}, tiles);
    }
  }

  struct Chunk {
    uint32_t panel, panels, begin, steps;
  };

  void run_rows(const Chunk& chunk, const std::byte* const* tiles) {
    const uint32_t blocks = divide_up(work_.num_rows, kBlockRows);
    configure_rows(kBlockRows);
    for (uint32_t block = 0; block < blocks; ++block) {
      const uint32_t row = block * kBlockRows;
      const uint32_t rows = work_.num_rows - row < kBlockRows ? work_.num_rows - row : kBlockRows;
      if (rows < kBlockRows) configure_rows(rows);
      for (uint32_t p = 0; p < chunk.panels; p += 2) {
        const bool pair = p + 1 < chunk.panels;
        const Ahead ahead = next_chunk(chunk, p, pair, block, blocks);
        if (rows > kTileRows) {
          pair ? run_block<2, 2>(chunk, tiles + p, p, row, rows, ahead)
               : run_block<2, 1>(chunk, tiles + p, p, row, rows, ahead);
        } else {
          pair ? run_block<1, 2>(chunk, tiles + p, p, row, rows, ahead)
               : run_block<1, 1>(chunk, tiles + p, p, row, rows, ahead);
        }
      }
    }
  }

  // What this thread reads next of panels p and p + 1, shared out over the blocks of rows.
  Ahead next_chunk(const Chunk& chunk, uint32_t p, bool pair, uint32_t block, uint32_t blocks) const {
    const uint32_t lines = divide_up(Source::kLines, blocks);
    if (block * lines >= Source::kLines) return {};
    const uint32_t next = chunk.begin + chunk.steps;
    const uint32_t panel = chunk.panel + p + (next < steps_ ? 0 : chunk.panels);
    const size_t offset = ((next < steps_ ? next : 0) * Source::kLines + block * lines * chunk.steps) * size_t{64};
    return {panel_at(panel) + offset, pair ? panel_at(panel + 1) + offset : nullptr, lines};
  }

  template <int kRowTiles, int kPanels>
  void run_block(const Chunk& chunk, const std::byte* const* tiles, uint32_t p, uint32_t row, uint32_t rows,
                 Ahead ahead) {
    const ResultBlock result = result_at(row, rows, chunk.panel + p);
    if (chunk.begin == 0) {
      zero_sums();
    } else {
      load_sums<kRowTiles, kPanels>(result);
    }
    multiply_block<Math, Source::kParts, kRowTiles, kPanels>(rows_at(row, rows, chunk.begin), tiles, chunk.steps,
                                                             ahead);
    store_sums<kRowTiles, kPanels>(result);
    if (chunk.begin + chunk.steps < steps_) return;
    for (uint32_t i = 0; i < kPanels; ++i) {
      const uint32_t panel = chunk.panel + p + i;
      end_.finish(result_at(row, rows, panel), PanelEnd(*work_.layout, panel_at(panel)), row);
    }
  }

  static constexpr uint32_t kMaxPanels = 32;
  const ProductWork& work_;
  const Blocking& blocking_;
  Source source_;
  End end_;
  uint32_t steps_;
};
