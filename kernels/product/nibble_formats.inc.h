// 4-bit formats with group scales, as what products of them are made from. Included INSIDE an anonymous namespace,
// after panel_walk.inc.h.

// What is added to code times scale.
enum class Offset { kNone, kZeros, kMinimums };

template <Code kCodeOfFormat, ScaleType kScaleOfFormat, int kLinesPerChunk, Offset kOffsetOfFormat>
struct NibbleFormat {
  static constexpr Code kCode = kCodeOfFormat;
  static constexpr ScaleType kScale = kScaleOfFormat;
  static constexpr int kLines = kLinesPerChunk;  // of 8 k; a chunk lies within one group
  static constexpr bool kZeros = kOffsetOfFormat == Offset::kZeros;
  static constexpr bool kMinimums = kOffsetOfFormat == Offset::kMinimums;
};

// Calls visit(NibbleFormat<...>{}) for a format of this kind; false: it is none.
template <class Visit>
inline bool visit_nibble_format(const WeightFormat& format, Visit&& visit) {
  constexpr auto kBf16 = ScaleType::kBFloat16;
  constexpr auto kF16 = ScaleType::kFloat16;
  if (format.quantised_rows || format.panel_scale) return false;
  if (format.minimums) {
    if (format.code != Code::kInt4 || format.group_size < 16 || format.scale != kF16) return false;
    format.group_size == 16 ? visit(NibbleFormat<Code::kInt4, kF16, 2, Offset::kMinimums>{})
                            : visit(NibbleFormat<Code::kInt4, kF16, 4, Offset::kMinimums>{});
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
