// Group scales of a panel for tile products. Included INSIDE an anonymous namespace, after widen_scales.inc.h.

// 16 e4m3 scales.
MOEBIUS_INLINE __m512 e4m3_scales(const std::byte* codes) {
  return widen_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

// target[padded_groups][16] float32, 64-byte aligned. Blocks of fp8 have one scale for all 16 columns.
void column_scales_of_groups(const PanelLayout& layout, const std::byte* panel, float* target) {
  if (!layout.format.panel_scale) return widen_scales(layout, panel, target);
  const float* scales = reinterpret_cast<const float*>(panel + layout.scales_offset);
  for (uint32_t group = 0; group < padded_groups(layout); ++group) {
    _mm512_store_ps(target + size_t{group} * kPanelColumns, _mm512_set1_ps(group < layout.groups ? scales[group] : 0));
  }
}
