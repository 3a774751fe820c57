// The products of float32 rows, once for all widths. Included INSIDE an anonymous namespace of a *_<isa>.cc file,
// after float32_block.inc.h.

// Hardware prefetchers stop at page ends and need a few lines to start again. So a block fetches its codes this far
// ahead, then the beginning of the next panels; the first block of a product also its own beginning. Beyond the
// product only what the thread reads next is fetched: its neighbours may be another thread's.
constexpr size_t kPrefetchBytes = 4096;

// Scales, and zero points or minimums, of kGroupsAtOnce groups, from `group`, of some strips.
[[gnu::noinline]] void widen_groups(const ProductWork& work, uint32_t first_strip, int strips, uint32_t group,
                                    uint32_t count, GroupBuffer* scales, GroupBuffer* offsets) {
  const PanelLayout& layout = *work.layout;
  for (int s = 0; s < strips; ++s) {
    const Strip strip = strip_of(work, first_strip + s);
    widen_scales(layout, strip.panel + layout.scales_offset, strip.column, group, count, &scales[s]);
    if (layout.format.zeros) widen_zeros(layout, strip.panel, strip.column, group, count, &offsets[s]);
    if (layout.format.minimums) {
      widen_scales(layout, strip.panel + layout.minimums_offset, strip.column, group, count, &offsets[s]);
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

template <class Decoder, int kRows, int kStrips>
void multiply_block(const ProductWork& work, uint32_t first_strip, uint32_t row) {
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
  GroupBuffer offsets[kStrips];  // zero points or minimums
  const float* const row_sums = reinterpret_cast<const float*>(work.scratch) + size_t{row} * layout.groups;
  Block<Decoder, kRows, kStrips> block(work, first_strip, row);
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
    block.begin_group(offsets, slot);
    do {
      const size_t stop = offset < turn && turn < end ? turn : end;
      const size_t ahead = offset < turn ? kPrefetchBytes : ahead_of_turn;
      do {
        block.multiply_unit(offset, k, ahead, kSteps);
        offset += Decoder::kUnitBytes;
        k += Decoder::kUnitK;
      } while (offset < stop);
    } while (offset < end);
    block.end_group(scales, slot);
    if (layout.format.minimums) block.add_minimums(offsets, slot, row_sums + group, layout.groups);
  }
  block.store(work, first_strip, row);
}

// All strips of strip..end-1 for one block of rows.
template <class Decoder, int kRows>
void run_rows(const ProductWork& work, uint32_t strip, uint32_t end, uint32_t row) {
  constexpr int kTogether = strips_together(kRows, Decoder::kUnitRegisters);
  for (; strip + kTogether <= end; strip += kTogether) multiply_block<Decoder, kRows, kTogether>(work, strip, row);
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

// target[num_rows][groups] = sums of the rows' elements over each group, in an order that no vector width changes.
[[gnu::noinline]] void sum_groups(const ProductWork& work, float* target) {
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
void run(const ProductWork& work) {
  if (work.layout->format.minimums) sum_groups(work, reinterpret_cast<float*>(work.scratch));
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

// The sums of every group of the rows, where minimums need them.
size_t scratch_float32(const PanelLayout& layout, uint32_t, uint32_t num_rows) {
  const size_t sums = layout.format.minimums ? size_t{num_rows} * layout.groups * sizeof(float) : 0;
  return (sums + 63) / 64 * 64;
}
