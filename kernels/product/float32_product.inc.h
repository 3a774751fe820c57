// The products of float32 rows, once for all widths. Included INSIDE an anonymous namespace of a *_<isa>.cc file,
// after Vec, the decoders and group_scales.inc.h.
//
// A strip is Vec::kLanes columns of a panel. kStrips strips and kRows rows are computed together in registers; every
// row and column adds up its products in the same order whatever those numbers are, so a row's bits do not depend on
// the rows and panels it is computed with: two chains along k, their sum times the group's scale into the total.

constexpr uint32_t kStripsPerPanel = kPanelColumns / Vec::kLanes;

// Hardware prefetchers stop at page ends and need a few lines to start again. The last kPrefetchBytes of a strip
// fetch the beginning of the one that follows. Past the last panel this is harmless: a prefetch never faults, and
// the next task's panel usually lies there.
constexpr size_t kPrefetchBytes = 4096;

template <class Decoder, int kRows, int kStrips>
struct Block {
  const ProductWork& work;
  const Decoder decoder;
  const std::byte* at[kStrips];  // first unit of each strip
  uint32_t first_strip;
  const float* rows[kRows];
  using Chains = Vec[kStrips][kRows][2];
  Vec total[kStrips][kRows];
  GroupBuffer scales[kStrips];
  GroupBuffer zeros[kStrips];

  const std::byte* panel(int strip) const {
    return work.panels + (first_strip + strip) / kStripsPerPanel * work.layout->panel_bytes;
  }
  uint32_t column(int strip) const { return (first_strip + strip) % kStripsPerPanel * Vec::kLanes; }

  Block(const ProductWork& product, uint32_t strip, uint32_t row)
      : work(product), decoder(product.layout->format), first_strip(strip) {
    for (int s = 0; s < kStrips; ++s) at[s] = panel(s) + column(s) * sizeof(uint32_t);
    for (int r = 0; r < kRows; ++r) rows[r] = static_cast<const float*>(work.rows[row + r]);
  }

  void widen(uint32_t group, uint32_t groups) {
    const uint32_t count = groups - group < kGroupsAtOnce ? groups - group : kGroupsAtOnce;
    for (int s = 0; s < kStrips; ++s) {
      widen_scales(*work.layout, panel(s), column(s), group, count, &scales[s]);
      if (work.layout->format.zeros) widen_zeros(*work.layout, panel(s), column(s), group, count, &zeros[s]);
    }
  }

  // The sums of units begin..end-1 of one group, times its scale, into the totals.
  [[gnu::always_inline]] void add_group(uint32_t begin, uint32_t end, uint32_t slot) {
    constexpr uint32_t kPanelsAhead = kStrips > static_cast<int>(kStripsPerPanel) ? kStrips / kStripsPerPanel : 1;
    const PanelLayout& layout = *work.layout;
    const size_t jump = kPanelsAhead * layout.panel_bytes - layout.scales_offset + kPrefetchBytes;
    const uint32_t units = static_cast<uint32_t>(layout.scales_offset / Decoder::kUnitBytes);
    constexpr uint32_t kUnitsAhead = kPrefetchBytes / Decoder::kUnitBytes;
    const uint32_t turn = units > kUnitsAhead ? units - kUnitsAhead : 0;

    Chains chains;
    Vec zero[kStrips];
    for (int s = 0; s < kStrips; ++s) {
      zero[s] = Vec::load(zeros[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) chains[s][r][0] = chains[s][r][1] = Vec::zero();
    }
    for (uint32_t unit = begin; unit < end;) {
      const uint32_t stop = unit < turn && turn < end ? turn : end;
      const size_t ahead = unit < turn ? kPrefetchBytes : jump;
      for (; unit < stop; ++unit) {
        multiply_unit(unit, ahead, zero, chains, std::make_integer_sequence<int, Decoder::kUnitK>());
      }
    }
    for (int s = 0; s < kStrips; ++s) {
      const Vec scale = Vec::load(scales[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) {
        total[s][r] = Vec::fma(scale, Decoder::finish(chains[s][r][0], chains[s][r][1]), total[s][r]);
      }
    }
  }

  template <int... kSteps>
  [[gnu::always_inline]] void multiply_unit(uint32_t index, size_t ahead, const Vec (&zero)[kStrips], Chains& chains,
                                            std::integer_sequence<int, kSteps...>) {
    typename Decoder::Unit units[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      const std::byte* const source = at[s] + size_t{index} * Decoder::kUnitBytes;
      for (uint32_t line = 0; line < Decoder::kUnitBytes && s % kStripsPerPanel == 0; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(source + ahead + line), _MM_HINT_T0);
      }
      units[s] = decoder.load(source, zero[s]);
    }
    (multiply_step<kSteps>(units, size_t{index} * Decoder::kUnitK, chains), ...);
  }

  // An element of a row serves all strips at once: kept for longer, it would need a register of its own.
  template <int kStep>
  [[gnu::always_inline]] void multiply_step(const typename Decoder::Unit (&units)[kStrips], size_t k, Chains& chains) {
    Vec values[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) values[s] = decoder.template value<kStep>(units[s]);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec element = Decoder::template row<kStep>(rows[r] + k);
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        chains[s][r][kStep % 2] = Vec::fma(element, values[s], chains[s][r][kStep % 2]);
      }
    }
  }

  void multiply() {
    const PanelLayout& layout = *work.layout;
    const uint32_t groups = layout.groups == 0 ? 1 : layout.groups;
    const uint32_t units = (layout.k + Decoder::kUnitK - 1) / Decoder::kUnitK;
    const uint32_t group_units = layout.groups == 0 ? units : layout.format.group_size / Decoder::kUnitK;
    for (int s = 0; s < kStrips; ++s) {
      for (int r = 0; r < kRows; ++r) total[s][r] = Vec::zero();
    }
    for (uint32_t group = 0; group < groups; ++group) {
      const uint32_t slot = group % kGroupsAtOnce;
      if (slot == 0) widen(group, groups);
      const uint32_t begin = group * group_units;
      add_group(begin, begin + group_units < units ? begin + group_units : units, slot);
    }
  }

  void store(uint32_t row) const {
    const PanelLayout& layout = *work.layout;
    for (int s = 0; s < kStrips; ++s) {
      const auto* const column_scale = reinterpret_cast<const float*>(panel(s) + layout.column_scale_offset) + column(s);
      const auto* const bias = reinterpret_cast<const float*>(panel(s) + layout.bias_offset) + column(s);
      float* const target = work.result + size_t{row} * work.result_stride + (first_strip + s) * Vec::kLanes;
      for (int r = 0; r < kRows; ++r) {
        Vec result = total[s][r];
        if (layout.format.column_scale) result = Vec::mul(result, Vec::load(column_scale));
        if (layout.has_bias) result = Vec::add(result, Vec::load(bias));
        result.store(target + r * work.result_stride);
      }
    }
  }
};

template <class Decoder, int kRows, int kStrips>
void multiply_block(const ProductWork& work, uint32_t strip, uint32_t row) {
  Block<Decoder, kRows, kStrips> block(work, strip, row);
  block.multiply();
  block.store(row);
}

// All strips of strip..end-1 for one block of rows.
template <class Decoder, int kRows>
void run_rows(const ProductWork& work, uint32_t strip, uint32_t end, uint32_t row) {
  constexpr int kTogether = strips_together(kRows);
  for (; strip + kTogether <= end; strip += kTogether) multiply_block<Decoder, kRows, kTogether>(work, strip, row);
  if constexpr (kTogether > 2) {
    for (; strip + 2 <= end; strip += 2) multiply_block<Decoder, kRows, 2>(work, strip, row);
  }
  if constexpr (kTogether > 1) {
    for (; strip < end; ++strip) multiply_block<Decoder, kRows, 1>(work, strip, row);
  }
}

template <class Decoder, int... kRowsMinusOne>
void run_any_rows(const ProductWork& work, uint32_t strip, uint32_t end, uint32_t row, uint32_t rows,
                  std::integer_sequence<int, kRowsMinusOne...>) {
  using Run = void (*)(const ProductWork&, uint32_t, uint32_t, uint32_t);
  static constexpr Run kTable[] = {run_rows<Decoder, kRowsMinusOne + 1>...};
  kTable[rows - 1](work, strip, end, row);
}

// Rows are cut into equal blocks (9 rows are 5 + 4, not 8 + 1). With several blocks each panel serves all of them
// before the next is touched, so weights come from memory once.
template <class Decoder>
void run(const ProductWork& work) {
  constexpr auto kSizes = std::make_integer_sequence<int, kMaxRows>();
  const uint32_t blocks = (work.num_rows + kMaxRows - 1) / kMaxRows;
  const uint32_t strips = work.num_panels * kStripsPerPanel;
  const uint32_t step = blocks > 1 ? kStripsPerPanel : strips;
  for (uint32_t strip = 0; strip < strips; strip += step) {
    uint32_t row = 0;
    for (uint32_t left = blocks; left > 0; --left) {
      const uint32_t rows = (work.num_rows - row + left - 1) / left;
      run_any_rows<Decoder>(work, strip, strip + step, row, rows, kSizes);
      row += rows;
    }
  }
}

void run_float32(const ProductWork& work) {
  const WeightFormat& format = work.layout->format;
  switch (format.code) {
    case Code::kFloat32: return run<Float32Decoder>(work);
    case Code::kBFloat16: return run<BFloat16Decoder>(work);
    case Code::kFloat16: return run<Float16Decoder>(work);
    case Code::kFloat8: return run<Float8Decoder>(work);
    case Code::kInt8: return run<Int8Decoder>(work);
    case Code::kInt4: return format.zeros ? run<Int4ZerosDecoder>(work) : run<Int4Decoder>(work);
    case Code::kFloat4: return run<Float4Decoder>(work);
  }
}

bool supports_float32(const WeightFormat& format) { return !format.quantised_rows; }

size_t scratch_none(const PanelLayout&, uint32_t, uint32_t) { return 0; }
