// The panels of a GEMM, one after the other, and what to ask for ahead of each. Included INSIDE an anonymous
// namespace of a file built for AVX-512, after <immintrin.h>, kernels/gemm/gemm.h, a definition of
// MOEBIUS_INLINE and widen_scales.inc.h.

struct Panel {
  const std::byte* codes;
  size_t codes_bytes;
  uint32_t k_padded;
  uint32_t group_size;         // 0: no group scales
  uint32_t groups;
  ScaleSection scales;
  const std::byte* zeros;      // as stored
  ScaleSection mins;
  const std::byte* next_tail;  // what follows the codes of the next panel (of this one if none is known)
  size_t tail_bytes;
  const std::byte* end;        // of the work's panels
  ptrdiff_t jump;              // from there to the panels that are read next; 0: not known
};

// Hardware prefetchers stop at page ends and know nothing of the next panel. 8 KiB is best or close to it for all
// formats on Zen 5 (4 KiB: up to 15 % less for 4-bit codes at one row; 16 KiB: less for 8-bit codes). The bytes
// after the codes, scales first, are asked for during the panel before. A prefetch past the end does not fault.
constexpr size_t kPrefetchBytes = 8192;

// Split rows ask twice: for the second-level cache kPrefetchBytes ahead, for the first-level one at this distance.
// 16 cores of an Emerald Rapids read a layer of 4-bit experts in 186 us so, one row; asking once, 8 KiB ahead, in 203.
constexpr size_t kNearPrefetchBytes = 2048;

MOEBIUS_INLINE void prefetch(const std::byte* address) {
  _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0);
}

MOEBIUS_INLINE void prefetch_second_level(const std::byte* address) {
  _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1);
}

// What to prefetch while `at` is read: kPrefetchBytes on in the order of reading.
MOEBIUS_INLINE const std::byte* ahead_of(const Panel& panel, const std::byte* at) {
  const std::byte* ahead = at + kPrefetchBytes;
  return ahead < panel.end ? ahead : ahead + panel.jump;
}

// How far ahead of a code to prefetch: `distance` of codes, leaving out what lies between two panels, or the same
// place of the next panel where panels are smaller than that; and on to where reading goes on. 0 where that is not
// known: what follows is read by another thread.
MOEBIUS_INLINE size_t bytes_ahead(const Panel& panel, size_t offset, size_t distance = kPrefetchBytes) {
  size_t ahead = panel.codes_bytes < distance ? panel.codes_bytes : distance;
  if (offset + ahead >= panel.codes_bytes) ahead += panel.tail_bytes;
  if (panel.codes + offset + ahead < panel.end) return ahead;
  return panel.jump != 0 ? ahead + static_cast<size_t>(panel.jump) : 0;
}

// The runs of k that are summed by themselves, each within one group. What lies after the last group is padding.
struct Chunks {
  uint32_t count;
  uint32_t group_shift;  // chunk >> group_shift is its group
};

MOEBIUS_INLINE Chunks chunks_of(const Panel& panel, uint32_t chunk_k) {
  const auto group_shift = static_cast<uint32_t>(__builtin_ctz(panel.group_size / chunk_k));
  const uint32_t padded = panel.k_padded / chunk_k;
  const uint32_t grouped = panel.groups << group_shift;
  return {grouped < padded ? grouped : padded, group_shift};
}

struct PanelJob {
  const GemmWork* work;
  Panel panel;
  const float* column_scale;  // null: 1
  const float* bias;          // null: 0
  float* result;              // of row 0
};

inline PanelJob panel_job(const GemmWork& work, uint32_t index) {
  const PanelLayout& layout = *work.layout;
  const std::byte* panel = work.panels + index * layout.panel_bytes;
  const std::byte* end = work.panels + work.num_panels * layout.panel_bytes;
  const std::byte* after = work.next != nullptr ? work.next : panel;
  const std::byte* next = index + 1 < work.num_panels ? panel + layout.panel_bytes : after;
  const auto floats_at = [panel](size_t offset) { return reinterpret_cast<const float*>(panel + offset); };
  PanelJob job{};
  job.work = &work;
  job.panel.codes = panel;
  job.panel.codes_bytes = layout.scales_offset;
  job.panel.k_padded = layout.k_padded;
  job.panel.group_size = layout.format.group_size;
  job.panel.groups = layout.groups;
  job.panel.scales = scale_section(layout, panel, false);
  job.panel.zeros = panel + layout.zeros_offset;
  job.panel.mins = scale_section(layout, panel, true);
  if (!layout.format.mins) job.panel.mins.first = nullptr;
  job.panel.next_tail = next + layout.scales_offset;
  job.panel.tail_bytes = layout.panel_bytes - layout.scales_offset;
  job.panel.end = end;
  job.panel.jump = work.next != nullptr ? work.next - end : 0;
  job.column_scale = layout.format.column_scale ? floats_at(layout.column_scale_offset) : nullptr;
  job.bias = layout.has_bias ? floats_at(layout.bias_offset) : nullptr;
  job.result = work.result + index * kPanelColumns;
  return job;
}

// Prefetches the first panel, unless it was the `next` of earlier work.
inline void prefetch_first_panel(const GemmWork& work) {
  if (work.was_next) return;
  const PanelLayout& layout = *work.layout;
  for (size_t at = 0; at < kPrefetchBytes; at += 64) prefetch(work.panels + at);
  for (size_t at = layout.scales_offset; at < layout.panel_bytes; at += 64) prefetch(work.panels + at);
}

// A row's sums over k of one panel, scaled by column and with the bias added.
MOEBIUS_INLINE void store_total(const PanelJob& job, uint32_t row, __m512 total) {
  const __m512 scale = job.column_scale != nullptr ? _mm512_load_ps(job.column_scale) : _mm512_set1_ps(1.0f);
  const __m512 bias = job.bias != nullptr ? _mm512_load_ps(job.bias) : _mm512_setzero_ps();
  _mm512_store_ps(job.result + row * job.work->result_stride, _mm512_fmadd_ps(total, scale, bias));
}

// --- Formats of codes of 2 to 6 bits, or expanded ones of 8, with group scales, as what GEMMs of them are made from.

// What is added to code times scale.
enum class Offset { kNone, kZeros, kMins };

template <Code kCodeOfFormat, ScaleType kScaleOfFormat, int kLinesPerChunk, Offset kOffsetOfFormat>
struct NibbleFormat {
  static constexpr Code kCode = kCodeOfFormat;
  static constexpr ScaleType kScale = kScaleOfFormat;
  static constexpr int kLines = kLinesPerChunk;  // of 8 k; a chunk lies within one group
  static constexpr bool kZeros = kOffsetOfFormat == Offset::kZeros;
  static constexpr bool kMins = kOffsetOfFormat == Offset::kMins;
};

// The same for codes of 2, 3, 5 and 6 bits and for iq codes.
template <class Visit>
inline bool visit_small_format(const WeightFormat& format, Visit&& visit) {
  constexpr auto kF16 = ScaleType::kFloat16;
  constexpr auto kProducts = ScaleType::kProducts;
  const bool products = format.scale == kProducts;
  switch (format.code) {
    case Code::kInt2:
      if (products != format.mins || format.group_size != (products ? 16 : 128)) return false;
      products ? visit(NibbleFormat<Code::kInt2, kProducts, 2, Offset::kMins>{})
               : visit(NibbleFormat<Code::kInt2, kF16, 4, Offset::kNone>{});
      return true;
    case Code::kInt3:
      if (!products || format.mins || format.group_size != 16) return false;
      visit(NibbleFormat<Code::kInt3, kProducts, 2, Offset::kNone>{});
      return true;
    case Code::kInt5:
      if (format.group_size != 32 || (products && !format.mins)) return false;
      products       ? visit(NibbleFormat<Code::kInt5, kProducts, 4, Offset::kMins>{})
      : format.mins ? visit(NibbleFormat<Code::kInt5, kF16, 4, Offset::kMins>{})
                    : visit(NibbleFormat<Code::kInt5, kF16, 4, Offset::kNone>{});
      return true;
    case Code::kInt6:
      if (!products || format.mins || format.group_size != 16) return false;
      visit(NibbleFormat<Code::kInt6, kProducts, 2, Offset::kNone>{});
      return true;
    case Code::kIq4:
      if (format.group_size != 32) return false;
      products ? visit(NibbleFormat<Code::kIq4, kProducts, 4, Offset::kNone>{})
               : visit(NibbleFormat<Code::kIq4, kF16, 4, Offset::kNone>{});
      return true;
    default: return false;
  }
}

// Calls visit(NibbleFormat<...>{}) for a format of this kind; false: it is none.
template <class Visit>
inline bool visit_nibble_format(const WeightFormat& format, Visit&& visit) {
  constexpr auto kBf16 = ScaleType::kBFloat16;
  constexpr auto kF16 = ScaleType::kFloat16;
  constexpr auto kProducts = ScaleType::kProducts;
  if (format.quantised_rows || format.panel_scale) return false;
  if (format.code > Code::kFloat4) return visit_small_format(format, visit);
  if (format.scale == kProducts) {
    if (format.code == Code::kInt8 && !format.mins) {
      format.group_size == 16 ? visit(NibbleFormat<Code::kInt8, kProducts, 2, Offset::kNone>{})
                              : visit(NibbleFormat<Code::kInt8, kProducts, 4, Offset::kNone>{});
      return true;
    }
    if (format.code != Code::kInt4 || !format.mins || format.group_size != 32) return false;
    visit(NibbleFormat<Code::kInt4, kProducts, 4, Offset::kMins>{});
    return true;
  }
  if (format.mins) {
    if (format.code != Code::kInt4 || format.group_size < 16 || format.scale != kF16) return false;
    format.group_size == 16 ? visit(NibbleFormat<Code::kInt4, kF16, 2, Offset::kMins>{})
                            : visit(NibbleFormat<Code::kInt4, kF16, 4, Offset::kMins>{});
    return true;
  }
  if (format.code == Code::kInt4 && format.group_size == 16 && format.scale == kF16 && !format.zeros) {
    visit(NibbleFormat<Code::kInt4, kF16, 2, Offset::kNone>{});
    return true;
  }
  if (format.code == Code::kInt4 && format.group_size >= 32 && format.scale == kBf16) {
    format.zeros ? visit(NibbleFormat<Code::kInt4, kBf16, 4, Offset::kZeros>{})
                 : visit(NibbleFormat<Code::kInt4, kBf16, 4, Offset::kNone>{});
  } else if (format.code == Code::kInt4 && format.group_size >= 32 && format.scale == kF16) {
    format.zeros ? visit(NibbleFormat<Code::kInt4, kF16, 4, Offset::kZeros>{})
                 : visit(NibbleFormat<Code::kInt4, kF16, 4, Offset::kNone>{});
  } else if (format.code == Code::kFloat4 && format.group_size >= 32 && format.scale == ScaleType::kE8M0) {
    visit(NibbleFormat<Code::kFloat4, ScaleType::kE8M0, 4, Offset::kNone>{});
  } else if (format.code == Code::kFloat4 && format.group_size >= 16 && format.scale == ScaleType::kE4M3) {
    visit(NibbleFormat<Code::kFloat4, ScaleType::kE4M3, 2, Offset::kNone>{});
  } else {
    return false;
  }
  return true;
}
