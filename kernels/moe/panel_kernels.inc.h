// The vector kernels, once for all widths. Included INSIDE an anonymous namespace of a *_<isa>.cc file,
// after a `Vec` with kLanes, kMaxRows and the operations used below: nothing here may get external linkage,
// or the linker could keep an AVX-512 copy of a function that every machine calls.

struct Float32Panel {
  using Element = float;
  static constexpr size_t kElementsPerK = 2 * Vec::kLanes;
  static void load(const Element* at, Vec& low, Vec& high) {
    low = Vec::load(at);
    high = Vec::load(at + Vec::kLanes);
  }
};

struct BFloat16Panel {
  using Element = uint32_t;
  static constexpr size_t kElementsPerK = Vec::kLanes;
  static void load(const Element* at, Vec& low, Vec& high) { Vec::load_pairs(at, low, high); }
};

// Panels computed together, so that few rows still keep enough independent chains in flight.
constexpr int panels_together(int rows) {
  const int fit = Vec::kMaxRows / rows;
  return fit >= 4 ? 4 : (fit >= 2 ? 2 : 1);
}

// Hardware prefetchers stop at page ends and need a few lines to start again. Measured on Zen 5 against
// none: 15-40 % for 8 and 32 rows, nothing lost for one row (which reads at the core's full bandwidth).
// Reading past the last panel is harmless: a prefetch never faults, and the next panel usually lies there.
constexpr size_t kPrefetchBytes = 4096;

template <class Panel>
[[gnu::always_inline]] inline void prefetch_ahead(const typename Panel::Element* weights) {
  constexpr size_t kBytes = Panel::kElementsPerK * sizeof(typename Panel::Element);
  const char* ahead = reinterpret_cast<const char*>(weights) + kPrefetchBytes;
  for (size_t line = 0; line < kBytes; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);
}

template <class Panel, int kRows, int kPanels>
struct Block {
  Vec low[kPanels][kRows];
  Vec high[kPanels][kRows];

  [[gnu::always_inline]] void multiply(const typename Panel::Element* panels, size_t panel_stride, uint32_t k,
                                       const float* const* rows) {
    const float* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = rows[r];
    for (int p = 0; p < kPanels; ++p) {
      for (int r = 0; r < kRows; ++r) low[p][r] = high[p][r] = Vec::zero();
    }
    for (size_t i = 0; i < k; ++i) {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        Vec weight_low, weight_high;
        const typename Panel::Element* weights = panels + p * panel_stride + i * Panel::kElementsPerK;
        prefetch_ahead<Panel>(weights);
        Panel::load(weights, weight_low, weight_high);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec a = Vec::broadcast(row[r][i]);
          low[p][r] = Vec::fma(a, weight_low, low[p][r]);
          high[p][r] = Vec::fma(a, weight_high, high[p][r]);
        }
      }
    }
  }
};

template <class Panel, int kRows, int kPanels>
void gate_up_block(const GateUpWork& work, uint32_t panel, uint32_t row) {
  const size_t stride = work.k * Panel::kElementsPerK;
  Block<Panel, kRows, kPanels> block;
  block.multiply(static_cast<const typename Panel::Element*>(work.panels) + panel * stride, stride, work.k,
                 work.rows + row);
  for (int p = 0; p < kPanels; ++p) {
    float* column = work.activation + (panel + p) * Vec::kLanes;
    for (int r = 0; r < kRows; ++r) {
      Vec::silu_times(block.low[p][r], block.high[p][r]).store(column + (row + r) * work.activation_stride);
    }
  }
}

template <class Panel, int kRows, int kPanels>
void down_block(const DownWork& work, uint32_t panel, uint32_t row) {
  const size_t stride = work.k * Panel::kElementsPerK;
  const float* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = work.activation + (row + r) * work.activation_stride;
  Block<Panel, kRows, kPanels> block;
  block.multiply(static_cast<const typename Panel::Element*>(work.panels) + panel * stride, stride, work.k, rows);
  for (int p = 0; p < kPanels; ++p) {
    const uint32_t column = (panel + p) * 2 * Vec::kLanes;
    for (int r = 0; r < kRows; ++r) {
      float* output = work.output + work.row_ids[row + r] * work.output_stride + column;
      const Vec weight = Vec::broadcast(work.weights[row + r]);
      Vec::add_scaled(output, weight, block.low[p][r], work.num_columns - column);
      if (column + Vec::kLanes < work.num_columns) {
        Vec::add_scaled(output + Vec::kLanes, weight, block.high[p][r], work.num_columns - column - Vec::kLanes);
      }
    }
  }
}

// `Kernel` picks gate_up_block or down_block; run<rows> does all panels of `count` for one block of rows.
template <class Panel>
struct GateUp {
  using Work = GateUpWork;
  template <int kRows, int kPanels>
  static void block(const Work& work, uint32_t panel, uint32_t row) {
    gate_up_block<Panel, kRows, kPanels>(work, panel, row);
  }
};

template <class Panel>
struct Down {
  using Work = DownWork;
  template <int kRows, int kPanels>
  static void block(const Work& work, uint32_t panel, uint32_t row) {
    down_block<Panel, kRows, kPanels>(work, panel, row);
  }
};

template <class Kernel, int kRows>
void run_rows(const typename Kernel::Work& work, uint32_t panel, uint32_t count, uint32_t row) {
  constexpr int kTogether = panels_together(kRows);
  const uint32_t end = panel + count;
  for (; panel + kTogether <= end; panel += kTogether) Kernel::template block<kRows, kTogether>(work, panel, row);
  if constexpr (kTogether > 2) {
    for (; panel + 2 <= end; panel += 2) Kernel::template block<kRows, 2>(work, panel, row);
  }
  for (; panel < end; ++panel) Kernel::template block<kRows, 1>(work, panel, row);
}

template <class Kernel, int... kRowsMinusOne>
void run_any_rows(const typename Kernel::Work& work, uint32_t panel, uint32_t count, uint32_t row, uint32_t rows,
                  std::integer_sequence<int, kRowsMinusOne...>) {
  using Fn = void (*)(const typename Kernel::Work&, uint32_t, uint32_t, uint32_t);
  static constexpr Fn kTable[] = {run_rows<Kernel, kRowsMinusOne + 1>...};
  kTable[rows - 1](work, panel, count, row);
}

// Rows are cut into equal blocks (9 rows are 5 + 4, not 8 + 1). With several blocks each panel serves all of
// them before the next is touched, so weights come from memory once.
template <class Kernel>
void run(const typename Kernel::Work& work) {
  constexpr auto kSizes = std::make_integer_sequence<int, Vec::kMaxRows>();
  const uint32_t blocks = (work.num_rows + Vec::kMaxRows - 1) / Vec::kMaxRows;
  const uint32_t panel_step = blocks > 1 ? 1 : work.num_panels;
  for (uint32_t panel = 0; panel < work.num_panels; panel += panel_step) {
    uint32_t row = 0;
    for (uint32_t left = blocks; left > 0; --left) {
      const uint32_t rows = (work.num_rows - row + left - 1) / left;
      run_any_rows<Kernel>(work, panel, panel_step, row, rows, kSizes);
      row += rows;
    }
  }
}

constexpr KernelTable kTable{Vec::kLanes, run<GateUp<Float32Panel>>, run<GateUp<BFloat16Panel>>,
                             run<Down<Float32Panel>>, run<Down<BFloat16Panel>>};
