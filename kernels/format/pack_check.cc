// What can be packed exactly, and errors that say what can not.
#include "kernels/format/pack_check.h"

#include <stdexcept>

#include "kernels/format/pack.h"

namespace moebius {
namespace {

const char* code_name(Code code) {
  switch (code) {
    case Code::kFloat32: return "float32";
    case Code::kBFloat16: return "bfloat16";
    case Code::kFloat16: return "float16";
    case Code::kFloat8: return "float8";
    case Code::kInt8: return "int8";
    case Code::kInt4: return "int4";
    case Code::kFloat4: return "float4";
  }
  return "unknown";
}

const char* scale_name(ScaleType type) {
  switch (type) {
    case ScaleType::kNone: return "no";
    case ScaleType::kFloat32: return "float32";
    case ScaleType::kBFloat16: return "bfloat16";
    case ScaleType::kFloat16: return "float16";
    case ScaleType::kE8M0: return "e8m0";
    case ScaleType::kE4M3: return "e4m3";
  }
  return "unknown";
}

bool widens(Code from, Code to) {
  return from == to || (to == Code::kFloat32 && (from == Code::kBFloat16 || from == Code::kFloat16));
}

std::string scales_obstacle(const SourceMatrix& source, const WeightFormat& format) {
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
  if (int4 && source.code != Code::kInt4) refuse("this layout holds int4 elements");
  if (float4 && source.code != Code::kFloat4) refuse("this layout holds float4 elements");
}

}  // namespace

std::string packing_obstacle(const SourceMatrix& source, const WeightFormat& format) {
  if (!widens(source.code, format.code)) {
    return std::string("its elements are ") + code_name(source.code) + ", the format's " + code_name(format.code);
  }
  if (source.zeros != nullptr && !format.zeros) return "it has zero points, the format none";
  if ((source.minimums != nullptr) != format.minimums) {
    return format.minimums ? "it has no minimums, the format has" : "it has minimums, the format none";
  }
  const bool has_column_scale = source.column_scale != nullptr || source.tensor_scale != 1.0f;
  if (has_column_scale && !format.column_scale) return "it has a scale per column or tensor, the format none";
  return scales_obstacle(source, format);
}

bool packs_exactly(const SourceMatrix& source, const WeightFormat& format) {
  return packing_obstacle(source, format).empty();
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
  if (source.minimums != nullptr && (source.group_size == 0 || source.zeros != nullptr)) {
    refuse("minimums need group scales and no zero points");
  }
  if (source.minimums != nullptr && source.code != Code::kInt4 && source.code != Code::kInt8) {
    refuse("minimums need int4 or int8 elements");
  }
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
  const std::string obstacle = packing_obstacle(source, layout.format);
  if (obstacle.empty()) return;
  refuse("it can not be packed as " + weight_format_name(layout.format) + " exactly: " + obstacle);
}

}  // namespace moebius
