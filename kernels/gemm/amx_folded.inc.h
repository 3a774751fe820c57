// GEMMs whose tiles need no group scales: sums stay in tile registers over as much of k as possible. Included
// INSIDE an anonymous namespace.
//
// Up to 32 rows: a panel at a time, its sums in tiles over all of k. More: pairs of panels, each against all blocks
// of 32 rows, while the next pair is fetched or decoded. Rows that are not equally spaced are copied first.

constexpr uint32_t kBlockRows = 2 * kTileRows;

// Sizes that keep what is used again in caches, measured on a machine with 48 KiB L1 and 2 MiB L2.
struct Blocking {
  uint32_t rows;          // whose part of `steps` stays in L2 while all panels pass
  uint32_t steps;         // of k in one piece
  uint32_t stream_steps;  // the same for few rows
  uint32_t ahead_bytes;   // how far ahead weights are fetched for few rows
};

uint32_t divide_up(uint32_t value, uint32_t by) { return (value + by - 1) / by; }

uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

// For tiles of two pieces, each of two panels.
constexpr size_t piece_tiles_bytes(const Blocking& blocking, size_t parts) {
  return 2 * 2 * size_t{blocking.steps} * parts * kTileBytes;
}

size_t folded_scratch_bytes(const Blocking& blocking, size_t parts, uint32_t num_rows) {
  const uint32_t rows = divide_up(smaller(num_rows, blocking.rows), kBlockRows) * kBlockRows;
  return piece_tiles_bytes(blocking, parts) + size_t{rows} * blocking.steps * 64;
}

// Equal chunks of at most `limit`, each a multiple of `unit`.
uint32_t chunk_steps(uint32_t steps, uint32_t limit, uint32_t unit) {
  const uint32_t chunks = divide_up(steps, limit);
  return divide_up(divide_up(steps, chunks), unit) * unit;
}

template <class Math, class End, class Source>
class FoldedGemm {
 public:
  FoldedGemm(const GemmWork& work, const Blocking& blocking)
      : work_(work), blocking_(blocking), source_(*work.layout), end_(work),
        steps_(divide_up(work.layout->k, Math::kStep)), chunk_(chunk_steps(steps_, blocking.steps, 1)),
        chunks_(divide_up(steps_, chunk_)), pairs_(divide_up(work.num_panels, 2)),
        packed_(work.scratch + piece_tiles_bytes(blocking, Source::kDecodes ? Source::kParts : 0)) {}

  void run() {
    if (work_.num_rows <= kBlockRows && !packs_rows()) {
      configure_rows(work_.num_rows);
      for (uint32_t panel = 0; panel < work_.num_panels; ++panel) {
        if (work_.num_rows <= kTileRows) {
          stream_panel<1>(panel);
        } else {
          stream_panel<2>(panel);
        }
      }
    } else {
      const uint32_t parts = divide_up(work_.num_rows, blocking_.rows);
      const uint32_t rows = divide_up(divide_up(work_.num_rows, parts), kBlockRows) * kBlockRows;
      for (uint32_t row = 0; row < work_.num_rows; row += rows) {
        run_rows(row, smaller(rows, work_.num_rows - row));
      }
    }
    Tiles::release();
  }

 private:
  bool packs_rows() const { return work_.row_stride == 0 && work_.num_rows > 1; }

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
      const Ahead ahead{codes + begin * Source::kLines * 64 + blocking_.ahead_bytes};
      const std::byte* tiles = source_.tiles(codes, begin, steps, work_.scratch);
      multiply_stream<Math, Source::kParts, kRowTiles, Source::kLines>(rows_at(0, work_.num_rows, begin), tiles, steps,
                                                                       ahead);
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

  // Pieces in the order in which they are computed: all pairs of panels over a chunk of k, then the next chunk.
  Piece piece(uint32_t index) const {
    if (index >= chunks_ * pairs_) return {};
    const uint32_t panel = index % pairs_ * 2;
    const uint32_t begin = index / pairs_ * chunk_;
    const bool pair = panel + 1 < work_.num_panels;
    return {{panel_at(panel), panel_at(pair ? panel + 1 : panel)},
            pair ? 2U : 1U,
            begin,
            steps_ - begin < chunk_ ? steps_ - begin : chunk_};
  }

  // What to fetch for a piece: after the last one, what this thread reads next.
  Piece fetched_piece(uint32_t index, bool last_rows) const {
    if (index < chunks_ * pairs_ || work_.next == nullptr || !last_rows) return piece(index);
    return {{work_.next, work_.next + work_.layout->panel_bytes}, 2, 0, smaller(chunk_, steps_)};
  }

  // Tiles of even and odd pieces.
  std::byte* buffer(uint32_t index) const {
    return work_.scratch + index % 2 * (size_t{chunk_} * 2 * Source::kParts * kTileBytes);
  }

  // Rows over a chunk of k, the two tiles of a block and step side by side: products read them as one stream.
  void pack_rows(uint32_t row, uint32_t rows, uint32_t begin, uint32_t steps) const {
    for (uint32_t i = 0; i < rows; ++i) {
      const std::byte* from = static_cast<const std::byte*>(work_.rows[row + i]) + begin * 64;
      std::byte* to = packed_block(i) + i % kBlockRows * 64;
      for (uint32_t step = 0; step < steps; ++step) {
        _mm512_store_si512(to + step * 2 * kTileBytes, _mm512_load_si512(from + step * 64));
      }
    }
  }

  std::byte* packed_block(uint32_t row) const {
    return packed_ + row / kBlockRows * (size_t{chunk_} * 2 * kTileBytes);
  }

  void run_rows(uint32_t row, uint32_t rows) {
    const uint32_t blocks = divide_up(rows, kBlockRows);
    const bool last_rows = row + rows == work_.num_rows;
    Task first = source_.task(piece(0), piece(1), buffer(0), 1);
    if (Source::kDecodes) finish_task(first);
    for (uint32_t index = 0; index < chunks_ * pairs_; ++index) {
      const Piece now = piece(index);
      if (index % pairs_ == 0 && packs_rows()) pack_rows(row, rows, now.begin, now.steps);
      const std::byte* tiles[2];
      for (uint32_t p = 0; p < 2; ++p) {
        tiles[p] = Source::kDecodes ? buffer(index) + p * now.steps * Source::kParts * kTileBytes
                                    : now.codes(p, Source::kLines);
      }
      const Piece next = Source::kDecodes ? piece(index + 1) : fetched_piece(index + 1, last_rows);
      Task task = source_.task(next, fetched_piece(index + 2, last_rows), buffer(index + 1), blocks * now.steps);
      run_piece({now, tiles, index % pairs_ * 2, row, rows}, task);
      finish_task(task);
    }
  }

  struct PieceOfRows {
    Piece piece;
    const std::byte* const* tiles;
    uint32_t panel, row, rows;
  };

  void run_piece(const PieceOfRows& part, Task& task) {
    configure_rows(kBlockRows);
    uint32_t row = 0;
    const bool pair = part.piece.num_panels == 2;
    for (; row + kBlockRows <= part.rows; row += kBlockRows) {
      pair ? run_block<2, 2>(part, row, kBlockRows, task) : run_block<2, 1>(part, row, kBlockRows, task);
    }
    const uint32_t rows = part.rows - row;
    if (rows == 0) return;
    configure_rows(rows);
    if (rows > kTileRows) {
      pair ? run_block<2, 2>(part, row, rows, task) : run_block<2, 1>(part, row, rows, task);
    } else {
      pair ? run_block<1, 2>(part, row, rows, task) : run_block<1, 1>(part, row, rows, task);
    }
  }

  template <int kRowTiles, int kPanels>
  void run_block(const PieceOfRows& part, uint32_t block_row, uint32_t rows, Task& task) {
    const uint32_t row = part.row + block_row;
    const ResultBlock result = result_at(row, rows, part.panel);
    if (part.piece.begin == 0) {
      zero_sums();
    } else {
      load_sums<kRowTiles, kPanels>(result);
    }
    const RowBlock block = packs_rows()
                               ? RowBlock{packed_block(block_row), 64, rows, 2 * kTileBytes, kTileBytes}
                               : rows_at(row, rows, part.piece.begin);
    multiply_block<Math, Source::kParts, kRowTiles, kPanels>(block, part.tiles, part.piece.steps, task);
    store_sums<kRowTiles, kPanels>(result);
    if (part.piece.begin + part.piece.steps < steps_) return;
    for (uint32_t i = 0; i < kPanels; ++i) {
      const uint32_t panel = part.panel + i;
      end_.finish(result_at(row, rows, panel), PanelEnd(*work_.layout, panel_at(panel)), row);
    }
  }

  const GemmWork& work_;
  const Blocking& blocking_;
  Source source_;
  End end_;
  uint32_t steps_;
  uint32_t chunk_;
  uint32_t chunks_;
  uint32_t pairs_;
  std::byte* packed_;
};
