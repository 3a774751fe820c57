// 4-bit formats with group scales, as what products of them are made from. Included INSIDE an anonymous namespace,
// after panel_walk.inc.h.

template <Code kCodeOfFormat, ScaleType kScaleOfFormat, int kLinesPerChunk, bool kHasZeros>
struct NibbleFormat {
  static constexpr Code kCode = kCodeOfFormat;
  static constexpr ScaleType kScale = kScaleOfFormat;
  static constexpr int kLines = kLinesPerChunk;  // of 8 k; a chunk lies within one group
  static constexpr bool kZeros = kHasZeros;
};

// Calls visit(NibbleFormat<...>{}) for a format of this kind; false: it is none.
template <class Visit>
inline bool visit_nibble_format(const WeightFormat& format, Visit&& visit) {
  constexpr auto kBf16 = ScaleType::kBFloat16;
  constexpr auto kF16 = ScaleType::kFloat16;
  if (format.quantised_rows || format.panel_scale) return false;
  if (format.code == Code::kInt4 && format.group_size >= 32 && format.scale == kBf16) {
    format.zeros ? visit(NibbleFormat<Code::kInt4, kBf16, 4, true>{})
                 : visit(NibbleFormat<Code::kInt4, kBf16, 4, false>{});
  } else if (format.code == Code::kInt4 && format.group_size >= 32 && format.scale == kF16) {
    format.zeros ? visit(NibbleFormat<Code::kInt4, kF16, 4, true>{})
                 : visit(NibbleFormat<Code::kInt4, kF16, 4, false>{});
  } else if (format.code == Code::kFloat4 && format.group_size >= 32 && format.scale == ScaleType::kE8M0) {
    visit(NibbleFormat<Code::kFloat4, ScaleType::kE8M0, 4, false>{});
  } else if (format.code == Code::kFloat4 && format.group_size >= 16 && format.scale == ScaleType::kE4M3) {
    visit(NibbleFormat<Code::kFloat4, ScaleType::kE4M3, 2, false>{});
  } else {
    return false;
  }
  return true;
}

// How far ahead of a code to prefetch: kPrefetchBytes of codes, leaving out what lies between two panels, or the
// same place of the next panel where panels are smaller than that; and on to where reading goes on.
MOEBIUS_INLINE size_t bytes_ahead(const Panel& panel, size_t offset) {
  const size_t codes_bytes = size_t{panel.k_padded} * 8;
  size_t ahead = codes_bytes < kPrefetchBytes ? codes_bytes : kPrefetchBytes;
  if (offset + ahead >= codes_bytes) ahead += panel.tail_bytes;
  return panel.codes + offset + ahead < panel.end ? ahead : ahead + static_cast<size_t>(panel.jump);
}
