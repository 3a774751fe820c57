#include "kernels/format/pack.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstring>

#include "kernels/format/pack_check.h"
#include "kernels/format/pack_columns.h"
#include "kernels/format/pack_lines.h"

namespace moebius {
namespace {

// Lines of a panel that are packed in the first-level cache, then written past the caches: a packed panel is not
// read again soon, and writing it in place would first read it from memory (1.3 to 1.7 times slower, measured).
// Where panels side by side share the source's cache lines, these lines of each are packed in turn.
constexpr uint32_t kChunkLines = 16;

struct Packer {
  PackLines lines;
  bool shares_cache_lines;
};

Packer packer_of(const SourceMatrix& source, Code code) {
  switch (source.layout) {
    case SourceLayout::kAwqInt4: return {pack_lines_awq, true};
    case SourceLayout::kGptqInt4: return {pack_lines_gptq, false};
    case SourceLayout::kPlain: break;
    default: return {pack_lines_row_major, false};
  }
  if (source.col_stride == 1) return {pack_lines_row_major, false};
  if (source.code == code && code_bits(code) >= 8) return {pack_lines_strided, true};
  return {pack_lines_reference, false};
}

// bytes is a multiple of 64.
void write_past_caches(const std::byte* source, size_t bytes, std::byte* target) {
  if (reinterpret_cast<uintptr_t>(target) % sizeof(__m128i) != 0) {
    std::memcpy(target, source, bytes);
    return;
  }
  for (size_t i = 0; i < bytes; i += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i), *reinterpret_cast<const __m128i*>(source + i));
  }
}

void pack_chunk(const SourceMatrix& source, const PanelLayout& layout, PackLines pack_lines, const LineRange& lines,
                std::byte* panel) {
  alignas(64) std::byte chunk[kChunkLines * 64];
  pack_lines(source, layout, lines, chunk);
  write_past_caches(chunk, size_t{lines.end - lines.begin} * 64, panel + size_t{lines.begin} * 64);
}

void pack_codes(const SourceMatrix& source, const PanelLayout& layout, const PanelRange& panels, std::byte* target) {
  const Packer packer = packer_of(source, layout.format.code);
  const uint32_t lines = layout.k_padded / (32 / code_bits(layout.format.code));
  const uint32_t together = packer.shares_cache_lines ? panels.count : 1;
  for (uint32_t first = 0; first < panels.count; first += together) {
    for (uint32_t begin = 0; begin < lines; begin += kChunkLines) {
      const uint32_t end = std::min(begin + kChunkLines, lines);
      for (uint32_t i = first; i < first + together; ++i) {
        pack_chunk(source, layout, packer.lines, {panels.first + i, begin, end}, target + i * panels.target_stride);
      }
    }
  }
  _mm_sfence();  // whoever learns that the panels are ready must see them
}

}  // namespace

void pack_panels(const SourceMatrix& source, const PanelLayout& layout, const PanelRange& panels, std::byte* target) {
  if (panels.count == 0) return;
  check_packing(source, layout, panels.first);
  check_packing(source, layout, panels.first + panels.count - 1);
  pack_codes(source, layout, panels, target);
  for (uint32_t i = 0; i < panels.count; ++i) {
    pack_panel_scales(source, layout, panels.first + i, target + i * panels.target_stride);
  }
}

void pack_panel(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel, std::byte* target) {
  pack_panels(source, layout, {panel, 1, layout.panel_bytes}, target);
}

}  // namespace moebius
