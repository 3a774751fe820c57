// GEMMs of rows of a grid: panels are expanded to int8 in memory of the thread, and any kernel of that multiplies them.
// Included INSIDE an anonymous namespace, after kernels/format/grids.h and GridLines, which expands 32 k:
//
//   GridLines::expand<kCode>(words, more, target)          lines of words, and bytes of signs, to eight lines of int8
//   GridLines::expand_digits(words, more, bits, bit, target)    the same of tq1, with bytes whose bits from one on are its
//   GridLines::wholes(words, target)                       a line of signs to 16 whole numbers of scales
//   GridLines::wholes_of_signs(more, target)               the same of iq1_s
//   GridLines::wholes_of_fields(layout, section, group, target)      the same of a section of scales

// Expanded panels that kernels want side by side, because they copy rows for each call: no more than this, or one.
constexpr size_t kExpandedBytes = size_t{1} << 20;
// How far ahead of the words that are expanded memory is asked for.
constexpr size_t kGridPrefetchBytes = 4096;

size_t expanded_at_once(const PanelLayout& expanded, uint32_t num_panels, bool one_by_one) {
  if (one_by_one) return 1;
  const size_t most = kExpandedBytes / expanded.panel_bytes;
  return most == 0 ? 1 : most < num_panels ? most : num_panels;
}

template <Code kCode>
[[gnu::noinline]] void expand_words(const PanelLayout& layout, const std::byte* panel, const std::byte* end,
                                    const std::byte* next, std::byte* codes, std::byte* wholes) {
  constexpr bool kIsTq1 = kCode == Code::kTq1;
  constexpr bool kIsIq1 = kCode == Code::kIq1S || kCode == Code::kIq1M || kIsTq1;  // or as those
  constexpr int kLines = kIsIq1 ? 1 : kCode == Code::kIq3Xxs || kCode == Code::kIq3S ? 3 : 2;
  constexpr uint32_t kMore = kPanelColumns * (kIsIq1 ? 2 : 1);
  constexpr bool kInWords = kCode == Code::kIq3Xxs || kCode == Code::kIq2Xxs || kCode == Code::kIq1S;
  const std::byte* words = panel;
  const std::byte* more = panel + layout.signs_offset;
  for (uint32_t k = 0; k < layout.k_padded; k += 32, words += kLines * 64, codes += 512, more += kMore) {
    for (int line = 0; line < kLines; ++line) {
      const std::byte* ahead = words + kGridPrefetchBytes + line * 64;
      if (ahead >= end) ahead = next == nullptr ? words : next + (ahead - end);
      __builtin_prefetch(ahead);
    }
    if constexpr (kIsTq1) {
      const std::byte* const bits = panel + layout.signs_offset + layout.k_padded + k / 64 * kPanelColumns;
      GridLines::expand_digits(words, more, bits, static_cast<int>(k / 32 % 2 * 4), codes);
    } else {
      GridLines::expand<kCode>(words, more, codes);
    }
    if (!kInWords || k >= layout.k) continue;
    kIsIq1 ? GridLines::wholes_of_signs(more, wholes) : GridLines::wholes(words + (kLines - 1) * 64, wholes);
    wholes += kPanelColumns;
  }
  if (kInWords) return;
  if (kIsTq1) return static_cast<void>(__builtin_memset(wholes, 1, size_t{layout.groups} * kPanelColumns));
  for (uint32_t group = 0; group < layout.groups; ++group, wholes += kPanelColumns) {
    GridLines::wholes_of_fields(layout, panel + layout.scales_offset, group, wholes);
  }
}

auto* expand_words_of(Code code) {
  switch (code) {
    case Code::kIq3Xxs: return expand_words<Code::kIq3Xxs>;
    case Code::kIq3S: return expand_words<Code::kIq3S>;
    case Code::kIq2Xxs: return expand_words<Code::kIq2Xxs>;
    case Code::kIq2Xs: return expand_words<Code::kIq2Xs>;
    case Code::kIq1S: return expand_words<Code::kIq1S>;
    case Code::kIq1M: return expand_words<Code::kIq1M>;
    case Code::kTq1: return expand_words<Code::kTq1>;
    default: return expand_words<Code::kIq2S>;
  }
}

// `end`: of the work's panels.
void expand_panel(const PanelLayout& layout, const std::byte* panel, const std::byte* end, const std::byte* next,
                  const PanelLayout& expanded, std::byte* target) {
  std::byte* const scales = target + expanded.scales_offset;
  expand_words_of(layout.format.code)(layout, panel, end, next, target, scales + expanded.whole_offset);
  __builtin_memcpy(scales, panel + layout.scales_offset, layout.whole_offset);
  auto* const units = reinterpret_cast<float*>(target + expanded.column_scale_offset);
  for (uint32_t column = 0; column < kPanelColumns; ++column) units[column] = grid_rows(layout.format.code).unit;
  if (!layout.has_bias) return;
  __builtin_memcpy(target + expanded.bias_offset, panel + layout.bias_offset, kPanelColumns * sizeof(float));
}

// A kernel's functions for its own formats and for rows of a grid.
template <bool (*kSupports)(const WeightFormat&)>
bool supports_or_expands(const WeightFormat& format) {
  return kSupports(expanded_format(format));
}

template <size_t (*kScratch)(const PanelLayout&, uint32_t, uint32_t), bool kOneByOne = true>
size_t scratch_or_expands(const PanelLayout& layout, uint32_t num_panels, uint32_t num_rows) {
  if (!is_grid(layout.format.code)) return kScratch(layout, num_panels, num_rows);
  const PanelLayout expanded = expanded_layout(layout);
  const size_t count = expanded_at_once(expanded, num_panels, kOneByOne);
  return count * expanded.panel_bytes + kScratch(expanded, static_cast<uint32_t>(count), num_rows);
}

template <void (*kRun)(const GemmWork&), bool kOneByOne = true>
void run_or_expands(const GemmWork& work) {
  if (!is_grid(work.layout->format.code)) return kRun(work);
  const PanelLayout& layout = *work.layout;
  const PanelLayout expanded = expanded_layout(layout);
  const auto most = static_cast<uint32_t>(expanded_at_once(expanded, work.num_panels, kOneByOne));
  const std::byte* const end = work.panels + work.num_panels * layout.panel_bytes;
  GemmWork part = work;
  part.layout = &expanded;
  part.panels = work.scratch;
  part.scratch = work.scratch + most * expanded.panel_bytes;
  part.next = nullptr;
  part.was_next = true;
  for (uint32_t panel = 0; panel < work.num_panels; panel += most) {
    part.num_panels = panel + most < work.num_panels ? most : work.num_panels - panel;
    part.result = work.result + size_t{panel} * kPanelColumns;
    for (uint32_t i = 0; i < part.num_panels; ++i) {
      expand_panel(layout, work.panels + (panel + i) * layout.panel_bytes, end, work.next, expanded,
                   work.scratch + i * expanded.panel_bytes);
    }
    kRun(part);
  }
}

template <size_t (*kBytes)(const PanelLayout&)>
size_t row_bytes_or_expands(const PanelLayout& layout) {
  return kBytes(is_grid(layout.format.code) ? expanded_layout(layout) : layout);
}

template <void (*kPrepare)(const PanelLayout&, const void*, std::byte*)>
void prepare_or_expands(const PanelLayout& layout, const void* row, std::byte* prepared) {
  kPrepare(is_grid(layout.format.code) ? expanded_layout(layout) : layout, row, prepared);
}
