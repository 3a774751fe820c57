#include "kernels/format/pack.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/format/pack_lines.h"
#include "kernels/format/panel_values.h"

namespace moebius {
namespace {

bool widens(Code from, Code to) {
  return from == to || (to == Code::kFloat32 && (from == Code::kBFloat16 || from == Code::kFloat16));
}

std::string unsupported_scales(const SourceMatrix& source, const WeightFormat& format) {
  if (source.group_size != format.group_size) {
    return "its group size is " + std::to_string(source.group_size) + ", the format's " +
           std::to_string(format.group_size);
  }
  if (format.group_size == 0) return {};
  if (source.scale_type != format.scale && format.scale != ScaleType::kFloat32) {
    return std::string("it has ") + scale_name(source.scale_type) + " scales, the format " + scale_name(format.scale);
  }
  if (format.panel_scale && (source.scale_rows % kPanelColumns != 0 || source.scale_row_begin % kPanelColumns != 0)) {
    return "scales of " + std::to_string(source.scale_rows) + " rows, from row " +
           std::to_string(source.scale_row_begin) +
           " of a block on, do not give all columns of a panel the same scale: both must be multiples of 16";
  }
  return {};
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("source matrix: " + what); }

void check_layout_code(const SourceMatrix& source) {
  const bool int4 = source.layout == SourceLayout::kCompressedInt4 || source.layout == SourceLayout::kAwqInt4 ||
                    source.layout == SourceLayout::kGptqInt4;
  const bool float4 = source.layout == SourceLayout::kMxfp4 || source.layout == SourceLayout::kNvfp4;
  if ((source.layout == SourceLayout::kGridWords) != is_grid(source.code)) refuse("rows of a grid are words of blocks");
  if (int4 && source.code != Code::kInt4) refuse("this layout holds int4 elements");
  if (float4 && source.code != Code::kFloat4) refuse("this layout holds float4 elements");
}

}  // namespace

std::string unsupported_reason(const SourceMatrix& source, const WeightFormat& format) {
  if (!widens(source.code, format.code)) {
    return std::string("its elements are ") + code_name(source.code) + ", the format's " + code_name(format.code);
  }
  if (source.order != nullptr && !format.ordered) return "its columns are sorted, the format has no order";
  if (source.zeros != nullptr && !format.zeros) return "it has zero points, the format none";
  if ((source.mins != nullptr) != format.mins) {
    return format.mins ? "it has no mins, the format has" : "it has mins, the format none";
  }
  const bool has_column_scale = source.column_scale != nullptr || source.tensor_scale != 1.0f;
  if (has_column_scale && !format.column_scale) return "it has a scale per column or tensor, the format none";
  return unsupported_scales(source, format);
}

bool packs_exactly(const SourceMatrix& source, const WeightFormat& format) {
  return unsupported_reason(source, format).empty();
}

void check_source(const SourceMatrix& source) {
  if (source.rows == 0 || source.cols == 0) refuse("it has no elements");
  if (source.data == nullptr) refuse("data is null");
  if ((source.group_size == 0) != (source.scale_type == ScaleType::kNone)) {
    refuse("group_size is " + std::to_string(source.group_size) + " with " + scale_name(source.scale_type) +
           " scales; either both or none");
  }
  if (source.group_size != 0 && source.scales == nullptr) refuse("scales are null");
  if (source.scale_rows == 0) refuse("scale_rows is 0");
  if (source.zeros != nullptr && (source.code != Code::kInt4 || source.group_size == 0)) {
    refuse("zero points need int4 elements with group scales");
  }
  if (source.mins != nullptr && (source.group_size == 0 || source.zeros != nullptr)) {
    refuse("mins need group scales and no zero points");
  }
  if (source.mins != nullptr && !is_integer(source.code)) refuse("mins need integer elements");
  check_layout_code(source);
}

void check_packing(const SourceMatrix& source, const PanelLayout& layout, uint32_t panel) {
  check_source(source);
  if (source.cols != layout.k) {
    refuse("it has " + std::to_string(source.cols) + " input features, the packed matrix " + std::to_string(layout.k));
  }
  if (uint64_t{panel} * kPanelColumns >= source.rows) {
    refuse("panel " + std::to_string(panel) + " begins beyond its " + std::to_string(source.rows) + " rows");
  }
  if (source.bias != nullptr && !layout.has_bias) refuse("it has a bias, the packed matrix none");
  const std::string reason = unsupported_reason(source, layout.format);
  if (reason.empty()) return;
  refuse("it can not be packed as " + weight_format_name(layout.format) + " exactly: " + reason);
}

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
    case SourceLayout::kGridWords: return {pack_lines_grid, false};
    case SourceLayout::kPlain: break;
    default: return {pack_lines_row_major, false};
  }
  if (code_bits(code) < 8 && code_bits(code) != 4) return {pack_lines_planes, false};
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
  const uint32_t bits = code_bits(layout.format.code);
  const uint32_t lines = layout.k_padded * bits / 32;
  const uint32_t chunk_lines = kChunkLines / bits * bits == 0 ? kChunkLines : kChunkLines / bits * bits;
  const uint32_t together = packer.shares_cache_lines ? panels.count : 1;
  for (uint32_t first = 0; first < panels.count; first += together) {
    for (uint32_t begin = 0; begin < lines; begin += chunk_lines) {
      const uint32_t end = std::min(begin + chunk_lines, lines);
      for (uint32_t i = first; i < first + together; ++i) {
        pack_chunk(source, layout, packer.lines, {panels.first + i, begin, end}, target + i * panels.target_stride);
      }
    }
  }
  _mm_sfence();  // any thread that sees the panels as ready must see their bytes
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

void unpack_column(const PanelLayout& layout, const std::byte* panel, uint32_t column, float* weights) {
  const WeightFormat& format = layout.format;
  const std::byte* const column_scales = panel + layout.column_scale_offset;
  const float column_scale = format.column_scale ? load_element<float>(column_scales, column) : 1.0f;
  const uint32_t group_size = layout.groups == 0 ? layout.k : format.group_size;
  for (uint32_t begin = 0, group = 0; begin < layout.k; begin += group_size, ++group) {
    const uint32_t entry = group * kPanelColumns + column;
    const float group_scale = panel_scale(layout, panel, false, format.panel_scale ? group : entry);
    const float minimum = format.mins ? panel_scale(layout, panel, true, entry) : 0.0f;
    for (uint32_t k = begin; k < std::min(begin + group_size, layout.k); ++k) {
      float weight = panel_value(layout, panel, column, k, entry) * group_scale;
      if (format.mins) weight += minimum;
      weights[k] = weight * column_scale;
    }
  }
}

void unpack_panel(const PanelLayout& layout, const std::byte* panel, float* weights, float* bias) {
  for (uint32_t column = 0; column < kPanelColumns; ++column) {
    unpack_column(layout, panel, column, weights + size_t{column} * layout.k);
    if (bias == nullptr) continue;
    bias[column] = layout.has_bias ? load_element<float>(panel + layout.bias_offset, column) : 0.0f;
  }
}

}  // namespace moebius
