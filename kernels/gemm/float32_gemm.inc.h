// Rows times strips in registers. Included INSIDE an anonymous namespace, after Vec, the decoders and
// group_scales.inc.h.
//
// A strip is Vec::kLanes columns of a panel. kStrips strips and kRows rows are computed together; every row and column
// adds up its products in the same order whatever those numbers are, so a row's bits do not depend on the rows and
// panels it is computed with: two chains along k, their sum times the group's scale into the total.

constexpr uint32_t kStripsPerPanel = kPanelColumns / Vec::kLanes;

// Where strip number `strip` of a GEMM lies.
struct Strip {
  const std::byte* panel;
  uint32_t column;  // of the panel, where the strip begins
};

[[gnu::always_inline]] inline Strip strip_of(const GemmWork& work, uint32_t strip) {
  return {work.panels + strip / kStripsPerPanel * work.layout->panel_bytes, strip % kStripsPerPanel * Vec::kLanes};
}

// The state of a block in registers; no function that is not inlined may see it.
template <class RowDecoder, int kRowCount, int kStripCount>
struct Block {
  using Decoder = RowDecoder;
  static constexpr int kRows = kRowCount;
  static constexpr int kStrips = kStripCount;

  const Decoder decoder;
  const std::byte* at[kStrips];  // first unit of each strip
  const float* rows[kRows];
  Vec total[kStrips][kRows];
  Vec chains[kStrips][kRows][2];
  Vec zero[kStrips];
  const float* row_sums;  // of row 0's groups, where mins need them
  size_t groups;

  [[gnu::always_inline]] Block(const GemmWork& work, uint32_t first_strip, uint32_t row)
      : decoder(*work.layout),
        row_sums(reinterpret_cast<const float*>(work.scratch) + size_t{row} * work.layout->groups),
        groups(work.layout->groups) {
    for (int s = 0; s < kStrips; ++s) {
      const Strip strip = strip_of(work, first_strip + s);
      at[s] = strip.panel + strip.column * sizeof(uint32_t);
      for (int r = 0; r < kRows; ++r) total[s][r] = Vec::zero();
    }
    for (int r = 0; r < kRows; ++r) rows[r] = static_cast<const float*>(work.rows[row + r]);
  }

  [[gnu::always_inline]] void begin_group(uint32_t, const GroupBuffer* zeros, uint32_t slot) {
    for (int s = 0; s < kStrips; ++s) {
      zero[s] = Vec::load(zeros[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) chains[s][r][0] = chains[s][r][1] = Vec::zero();
    }
  }

  // Mins times the sums of the rows' elements in the group.
  [[gnu::always_inline]] void add_mins(uint32_t group, const GroupBuffer* mins, uint32_t slot) {
    for (int s = 0; s < kStrips; ++s) {
      const Vec minimum = Vec::load(mins[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) {
        total[s][r] = Vec::fma(minimum, Vec::broadcast(row_sums[r * groups + group]), total[s][r]);
      }
    }
  }

  [[gnu::always_inline]] void end_group(uint32_t, const GroupBuffer* scales, uint32_t slot) {
    for (int s = 0; s < kStrips; ++s) {
      const Vec scale = Vec::load(scales[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) {
        total[s][r] = Vec::fma(scale, Decoder::finish(chains[s][r][0], chains[s][r][1]), total[s][r]);
      }
    }
  }

  // One unit of every strip, `offset` bytes into the codes, and the rows' elements from k; fetches `ahead` bytes on.
  template <int... kSteps>
  [[gnu::always_inline]] void multiply_unit(size_t offset, size_t k, size_t ahead,
                                            std::integer_sequence<int, kSteps...>) {
    typename Decoder::Unit units[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      const std::byte* const source = at[s] + offset;
      for (uint32_t line = 0; line < Decoder::kUnitBytes && s % kStripsPerPanel == 0; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(source + ahead + line), _MM_HINT_T0);
      }
      units[s] = decoder.load(source, k, zero[s]);
    }
    if constexpr (Decoder::kRareCodes) {
      if (Decoder::any_rare(units)) [[unlikely]] {
        (multiply_step<kSteps, true>(units, k), ...);
        return;
      }
    }
    (multiply_step<kSteps, false>(units, k), ...);
  }

  // An element of a row serves all strips at once: kept for longer, it would need a register of its own.
  template <int kStep, bool kRare>
  [[gnu::always_inline]] void multiply_step(const typename Decoder::Unit (&units)[kStrips], size_t k) {
    Vec values[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      values[s] = decoder.template value<kStep>(units[s]);
      if constexpr (kRare) values[s] = Decoder::repair(values[s]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec element = Decoder::template row<kStep>(rows[r] + k);
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        chains[s][r][kStep % 2] = Vec::fma(element, values[s], chains[s][r][kStep % 2]);
      }
    }
  }

  [[gnu::always_inline]] void store(const GemmWork& work, uint32_t first_strip, uint32_t row) const {
    const PanelLayout& layout = *work.layout;
    for (int s = 0; s < kStrips; ++s) {
      const Strip strip = strip_of(work, first_strip + s);
      const auto* const column_scale = reinterpret_cast<const float*>(strip.panel + layout.column_scale_offset);
      const auto* const bias = reinterpret_cast<const float*>(strip.panel + layout.bias_offset);
      float* const target = work.result + row * work.result_stride + size_t{first_strip + s} * Vec::kLanes;
      for (int r = 0; r < kRows; ++r) {
        Vec result = total[s][r];
        if (layout.format.column_scale) result = Vec::mul(result, Vec::load(column_scale + strip.column));
        if (layout.has_bias) result = Vec::add(result, Vec::load(bias + strip.column));
        result.store(target + r * work.result_stride);
      }
    }
  }
};

// --- GEMMs of float32 rows, once for all widths.

// Hardware prefetchers stop at page ends and need a few lines to start again. So a block fetches its codes this far
// ahead, then the beginning of the next panels; the first block of a GEMM also its own beginning. Beyond the
// GEMM only what the thread reads next is fetched: its neighbours may be another thread's.
constexpr size_t kPrefetchBytes = 4096;

// Scales, and zero points or mins, of kGroupsAtOnce groups, from `group`, of some strips.
[[gnu::noinline]] void widen_groups(const GemmWork& work, uint32_t first_strip, int strips, uint32_t group,
                                    uint32_t count, GroupBuffer* scales, GroupBuffer* offsets) {
  const PanelLayout& layout = *work.layout;
  for (int s = 0; s < strips; ++s) {
    const Strip strip = strip_of(work, first_strip + s);
    widen_scales(layout, strip.panel, false, strip.column, group, count, &scales[s]);
    if (layout.format.zeros) widen_zeros(layout, strip.panel, strip.column, group, count, &offsets[s]);
    if (layout.format.mins) {
      widen_scales(layout, strip.panel, true, strip.column, group, count, &offsets[s]);
    }
  }
}

// Fetches the bytes begin..end-1 of `count` panels.
[[gnu::always_inline]] inline void prefetch_panels(const std::byte* panels, const PanelLayout& layout, uint32_t count,
                                                   size_t begin, size_t end) {
  for (size_t byte = begin / 64 * 64; byte < end; byte += 64) {
    for (uint32_t i = 0; i < count; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(panels + i * layout.panel_bytes + byte), _MM_HINT_T0);
    }
  }
}

// What a block reads, in bytes of a panel's codes.
template <class Decoder>
struct Extent {
  uint32_t groups;
  size_t group_bytes;  // of codes
  size_t codes_end;    // without padding
  size_t scales_bytes;  // and everything else that follows the codes

  explicit Extent(const PanelLayout& layout) {
    groups = layout.groups == 0 ? 1 : layout.groups;
    codes_end = size_t{(layout.k + Decoder::kUnitK - 1) / Decoder::kUnitK} * Decoder::kUnitBytes;
    group_bytes = size_t{layout.format.group_size} / Decoder::kUnitK * Decoder::kUnitBytes;
    if (layout.groups == 0) group_bytes = codes_end;
    scales_bytes = layout.panel_bytes - layout.scales_offset;
  }
};

template <class Rows>
void multiply_block(const GemmWork& work, uint32_t first_strip, uint32_t row) {
  using Decoder = typename Rows::Decoder;
  constexpr int kStrips = Rows::kStrips;
  constexpr uint32_t kPanels = kStrips > static_cast<int>(kStripsPerPanel) ? kStrips / kStripsPerPanel : 1;
  constexpr auto kSteps = std::make_integer_sequence<int, Decoder::kUnitK>();
  const PanelLayout& layout = *work.layout;
  const Extent<Decoder> extent(layout);
  const uint32_t next_panel = first_strip / kStripsPerPanel + kPanels;
  const size_t turn = layout.scales_offset > kPrefetchBytes ? layout.scales_offset - kPrefetchBytes : 0;
  const std::byte* const panels = work.panels + size_t{next_panel - kPanels} * layout.panel_bytes;
  const std::byte* next = next_panel == work.num_panels ? work.next : nullptr;
  if (next_panel + kPanels <= work.num_panels) next = panels + kPanels * layout.panel_bytes;
  const size_t ahead_of_turn = next != nullptr ? static_cast<size_t>(next - panels) - turn : 0;
  if (first_strip == 0 && row == 0) {
    prefetch_panels(work.panels, layout, kPanels, 0, kPrefetchBytes);
    prefetch_panels(work.panels, layout, kPanels, layout.scales_offset, layout.panel_bytes);
  }

  GroupBuffer scales[kStrips];
  GroupBuffer offsets[kStrips];  // zero points or mins
  Rows block(work, first_strip, row);
  size_t offset = 0;
  size_t k = 0;
  for (uint32_t group = 0; group < extent.groups; ++group) {
    const uint32_t slot = group % kGroupsAtOnce;
    if (slot == 0) {
      const uint32_t left = extent.groups - group;
      const uint32_t count = left < kGroupsAtOnce ? left : kGroupsAtOnce;
      widen_groups(work, first_strip, kStrips, group, count, scales, offsets);
      const size_t scales_byte = layout.scales_offset + extent.scales_bytes * group / extent.groups;
      const size_t scales_end = layout.scales_offset + extent.scales_bytes * (group + count) / extent.groups;
      if (next != nullptr) prefetch_panels(next, layout, kPanels, scales_byte, scales_end);
    }
    const size_t end = offset + extent.group_bytes < extent.codes_end ? offset + extent.group_bytes : extent.codes_end;
    block.begin_group(group, offsets, slot);
    do {
      const size_t stop = offset < turn && turn < end ? turn : end;
      const size_t ahead = offset < turn ? kPrefetchBytes : ahead_of_turn;
      do {
        block.multiply_unit(offset, k, ahead, kSteps);
        offset += Decoder::kUnitBytes;
        k += Decoder::kUnitK;
      } while (offset < stop);
    } while (offset < end);
    block.end_group(group, scales, slot);
    if (layout.format.mins) block.add_mins(group, offsets, slot);
  }
  block.store(work, first_strip, row);
}

// All strips of strip..end-1 for one block of rows.
template <class Decoder, int kRows>
void run_rows(const GemmWork& work, uint32_t strip, uint32_t end, uint32_t row) {
  constexpr int kTogether = strips_together(kRows, Decoder::kUnitRegisters);
  for (; strip + kTogether <= end; strip += kTogether) multiply_block<Block<Decoder, kRows, kTogether>>(work, strip, row);
  if constexpr (kTogether > 1) {
    for (; strip < end; ++strip) multiply_block<Block<Decoder, kRows, 1>>(work, strip, row);
  }
}

template <class Decoder, int... kRowsMinusOne>
void run_any_rows(const GemmWork& work, uint32_t strip, uint32_t end, uint32_t row, uint32_t rows,
                  std::integer_sequence<int, kRowsMinusOne...>) {
  using Run = void (*)(const GemmWork&, uint32_t, uint32_t, uint32_t);
  static constexpr Run kTable[] = {run_rows<Decoder, kRowsMinusOne + 1>...};
  kTable[rows - 1](work, strip, end, row);
}

// target[num_rows][groups] = sums of the rows' elements over each group, in an order that no vector width changes.
[[gnu::noinline]] void sum_groups(const GemmWork& work, float* target) {
  const PanelLayout& layout = *work.layout;
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    const float* const elements = static_cast<const float*>(work.rows[row]);
    for (uint32_t group = 0; group < layout.groups; ++group) {
      constexpr uint32_t kChains = 16;
      float chains[kChains] = {};
      const uint32_t begin = group * layout.format.group_size;
      const uint32_t end = begin + layout.format.group_size;
      for (uint32_t k = begin; k < end && k < layout.k_padded; k += kChains) {
        for (uint32_t i = 0; i < kChains; ++i) chains[i] += elements[k + i];
      }
      float total = 0.0f;
      for (const float chain : chains) total += chain;
      *target++ = total;
    }
  }
}

// Rows are cut into equal blocks (9 rows are 5 + 4, not 8 + 1). With several blocks each panel serves all of them
// before the next is touched, so weights come from memory once.
template <class Decoder>
void run(const GemmWork& work) {
  if (work.layout->format.mins) sum_groups(work, reinterpret_cast<float*>(work.scratch));
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

void run_float32(const GemmWork& work) {
  const WeightFormat& format = work.layout->format;
  switch (format.code) {
    case Code::kFloat32: return run<Float32Decoder>(work);
    case Code::kBFloat16: return run<BFloat16Decoder>(work);
    case Code::kFloat16: return run<Float16Decoder>(work);
    case Code::kFloat8: return run<Float8Decoder>(work);
    case Code::kInt8: return run<Int8Decoder>(work);
    case Code::kInt4: return format.zeros ? run<Int4ZerosDecoder>(work) : run<Int4Decoder>(work);
    case Code::kFloat4: return run<Float4Decoder>(work);
    case Code::kIq4: return run<Iq4Decoder>(work);
    case Code::kIq3Xxs:
    case Code::kIq3S:
    case Code::kIq2Xxs:
    case Code::kIq2Xs:
    case Code::kIq2S:
    case Code::kIq1S:
    case Code::kIq1M:
    case Code::kTq1: break;  // their callers'
    case Code::kInt2: return run<PlaneDecoder<2>>(work);
    case Code::kInt3: return run<PlaneDecoder<3>>(work);
    case Code::kInt5: return run<PlaneDecoder<5>>(work);
    case Code::kInt6: return run<PlaneDecoder<6>>(work);
  }
}

bool supports_float32(const WeightFormat& format) { return !format.quantised_rows; }

// The sums of every group of the rows, where mins need them.
size_t scratch_float32(const PanelLayout& layout, uint32_t, uint32_t num_rows) {
  const size_t sums = layout.format.mins ? size_t{num_rows} * layout.groups * sizeof(float) : 0;
  return (sums + 63) / 64 * 64;
}
