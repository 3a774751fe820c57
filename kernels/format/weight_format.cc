#include "kernels/format/weight_format.h"

#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

namespace moebius {
namespace {

using NamedFormat = std::pair<std::string, WeightFormat>;

WeightFormat plain(Code code) {
  WeightFormat format;
  format.code = code;
  return format;
}

WeightFormat with_columns(Code code, bool quantised_rows) {
  WeightFormat format = plain(code);
  format.column_scale = true;
  format.quantised_rows = quantised_rows;
  return format;
}

WeightFormat grouped(Code code, ScaleType scale, uint32_t group_size) {
  WeightFormat format = plain(code);
  format.scale = scale;
  format.group_size = group_size;
  return format;
}

WeightFormat with_mins(Code code, uint32_t group_size, ScaleType scale = ScaleType::kFloat16) {
  WeightFormat format = grouped(code, scale, group_size);
  format.mins = true;
  return format;
}

WeightFormat fp8_block() {
  WeightFormat format = grouped(Code::kFloat8, ScaleType::kFloat32, 128);
  format.panel_scale = true;
  return format;
}

WeightFormat nvfp4() {
  WeightFormat format = grouped(Code::kFloat4, ScaleType::kE4M3, 16);
  format.column_scale = true;
  return format;
}

std::vector<NamedFormat> make_formats() {
  std::vector<NamedFormat> formats = {
      {"float32", plain(Code::kFloat32)},
      {"bfloat16", plain(Code::kBFloat16)},
      {"float16", plain(Code::kFloat16)},
      {"fp8_block", fp8_block()},
      {"fp8_g32", grouped(Code::kFloat8, ScaleType::kFloat32, 32)},
      {"fp8_g128", grouped(Code::kFloat8, ScaleType::kFloat32, 128)},
      {"mxfp8", grouped(Code::kFloat8, ScaleType::kE8M0, 32)},
      {"fp8_channel", with_columns(Code::kFloat8, false)},
      {"int8", with_columns(Code::kInt8, false)},
      {"int8_w8a8", with_columns(Code::kInt8, true)},
  };
  for (const uint32_t group_size : {32U, 64U, 128U}) {
    const std::string name = "int8_g" + std::to_string(group_size);
    formats.emplace_back(name, grouped(Code::kInt8, ScaleType::kBFloat16, group_size));
    formats.emplace_back(name + "_f16", grouped(Code::kInt8, ScaleType::kFloat16, group_size));
  }
  formats.emplace_back("int8_g16_f16", grouped(Code::kInt8, ScaleType::kFloat16, 16));
  formats.emplace_back("int8_g32_mins", with_mins(Code::kInt8, 32));
  formats.emplace_back("int4_g16_f16", grouped(Code::kInt4, ScaleType::kFloat16, 16));
  formats.emplace_back("int4_g16_mins", with_mins(Code::kInt4, 16));
  formats.emplace_back("int4_g32_mins", with_mins(Code::kInt4, 32));
  constexpr auto kProducts = ScaleType::kProducts;
  formats.emplace_back("int2_g128_f16", grouped(Code::kInt2, ScaleType::kFloat16, 128));
  formats.emplace_back("int2_g16_mins_products", with_mins(Code::kInt2, 16, kProducts));
  formats.emplace_back("int3_g16_products", grouped(Code::kInt3, kProducts, 16));
  formats.emplace_back("int4_g32_mins_products", with_mins(Code::kInt4, 32, kProducts));
  formats.emplace_back("int5_g32_f16", grouped(Code::kInt5, ScaleType::kFloat16, 32));
  formats.emplace_back("int5_g32_mins", with_mins(Code::kInt5, 32));
  formats.emplace_back("int5_g32_mins_products", with_mins(Code::kInt5, 32, kProducts));
  formats.emplace_back("int6_g16_products", grouped(Code::kInt6, kProducts, 16));
  formats.emplace_back("iq4_g32_f16", grouped(Code::kIq4, ScaleType::kFloat16, 32));
  formats.emplace_back("iq4_g32_products", grouped(Code::kIq4, kProducts, 32));
  formats.emplace_back("iq3_xxs_grid_products", grouped(Code::kIq3Xxs, kProducts, 32));
  formats.emplace_back("iq3_s_grid_products", grouped(Code::kIq3S, kProducts, 32));
  formats.emplace_back("iq2_xxs_grid_products", grouped(Code::kIq2Xxs, kProducts, 32));
  formats.emplace_back("iq2_xs_grid_products", grouped(Code::kIq2Xs, kProducts, 16));
  formats.emplace_back("iq2_s_grid_products", grouped(Code::kIq2S, kProducts, 16));
  formats.emplace_back("iq1_s_grid_products", grouped(Code::kIq1S, kProducts, 32));
  formats.emplace_back("iq1_m_grid_products", grouped(Code::kIq1M, kProducts, 16));
  formats.emplace_back("tq1_products", grouped(Code::kTq1, kProducts, 32));
  for (const bool zeros : {false, true}) {
    for (const uint32_t group_size : {32U, 64U, 128U}) {
      for (const ScaleType scale : {ScaleType::kBFloat16, ScaleType::kFloat16}) {
        WeightFormat format = grouped(Code::kInt4, scale, group_size);
        format.zeros = zeros;
        formats.emplace_back("int4_g" + std::to_string(group_size) + (zeros ? "_zeros" : "") +
                                 (scale == ScaleType::kFloat16 ? "_f16" : ""),
                             format);
      }
    }
  }
  formats.emplace_back("mxfp4", grouped(Code::kFloat4, ScaleType::kE8M0, 32));
  formats.emplace_back("nvfp4", nvfp4());
  return formats;
}

const std::vector<NamedFormat>& formats() {
  static const std::vector<NamedFormat> all = make_formats();
  return all;
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("weight format: " + what); }

// The end of the names of formats whose columns are sorted by group.
constexpr std::string_view kOrdered = "_ordered";
// Between the names of gate's and up's formats.
constexpr char kBetween = '+';

}  // namespace

uint32_t code_bits(Code code) {
  switch (code) {
    case Code::kFloat32: return 32;
    case Code::kBFloat16:
    case Code::kFloat16: return 16;
    case Code::kFloat8:
    case Code::kInt8: return 8;
    case Code::kInt4:
    case Code::kFloat4:
    case Code::kIq4: return 4;
    case Code::kInt2:
    case Code::kIq2Xxs:
    case Code::kIq2Xs:
    case Code::kIq2S: return 2;
    case Code::kInt3:
    case Code::kIq3Xxs:
    case Code::kIq3S: return 3;
    case Code::kIq1S:
    case Code::kIq1M:
    case Code::kTq1: return 1;
    case Code::kInt5: return 5;
    case Code::kInt6: return 6;
  }
  refuse("element code " + std::to_string(static_cast<int>(code)) + " is unknown");
}

uint32_t scale_bytes(ScaleType scale) {
  switch (scale) {
    case ScaleType::kNone: return 0;
    case ScaleType::kFloat32: return 4;
    case ScaleType::kBFloat16:
    case ScaleType::kFloat16: return 2;
    case ScaleType::kE8M0:
    case ScaleType::kE4M3:
    case ScaleType::kProducts: return 1;
  }
  refuse("scale type " + std::to_string(static_cast<int>(scale)) + " is unknown");
}

bool is_grid(Code code) { return code > Code::kIq4; }

bool is_iq1(Code code) { return code == Code::kIq1S || code == Code::kIq1M; }

uint32_t sign_bytes(Code code) {
  if (is_iq1(code) || code == Code::kTq1) return 2;
  return code == Code::kIq3S || code == Code::kIq2S ? 1 : 0;
}

bool is_integer(Code code) { return code == Code::kInt8 || code_middle(code) != 0; }

uint32_t code_middle(Code code) {
  switch (code) {
    case Code::kInt2: return 2;
    case Code::kInt3: return 4;
    case Code::kInt4: return 8;
    case Code::kInt5: return 16;
    case Code::kInt6: return 32;
    default: return 0;
  }
}

const char* code_name(Code code) {
  switch (code) {
    case Code::kFloat32: return "float32";
    case Code::kBFloat16: return "bfloat16";
    case Code::kFloat16: return "float16";
    case Code::kFloat8: return "float8";
    case Code::kInt8: return "int8";
    case Code::kInt4: return "int4";
    case Code::kFloat4: return "float4";
    case Code::kInt2: return "int2";
    case Code::kInt3: return "int3";
    case Code::kInt5: return "int5";
    case Code::kInt6: return "int6";
    case Code::kIq4: return "iq4";
    case Code::kIq3Xxs: return "iq3_xxs";
    case Code::kIq3S: return "iq3_s";
    case Code::kIq2Xs: return "iq2_xs";
    case Code::kIq1S: return "iq1_s";
    case Code::kIq1M: return "iq1_m";
    case Code::kTq1: return "tq1";
    case Code::kIq2Xxs: return "iq2_xxs";
    case Code::kIq2S: return "iq2_s";
  }
  refuse("element code " + std::to_string(static_cast<int>(code)) + " is unknown");
}

const char* scale_name(ScaleType scale) {
  switch (scale) {
    case ScaleType::kNone: return "no";
    case ScaleType::kFloat32: return "float32";
    case ScaleType::kBFloat16: return "bfloat16";
    case ScaleType::kFloat16: return "float16";
    case ScaleType::kE8M0: return "e8m0";
    case ScaleType::kE4M3: return "e4m3";
    case ScaleType::kProducts: return "products";
  }
  refuse("scale type " + std::to_string(static_cast<int>(scale)) + " is unknown");
}

std::vector<std::string> weight_format_names() {
  std::vector<std::string> names;
  for (const auto& [name, format] : formats()) names.push_back(name);
  return names;
}

WeightFormat parse_weight_format(const std::string& name) {
  if (name.ends_with(kOrdered)) {
    WeightFormat format = parse_weight_format(name.substr(0, name.size() - kOrdered.size()));
    if (format.ordered) refuse("'" + name + "' is ordered twice");
    format.ordered = true;
    check_weight_format(format);
    return format;
  }
  std::string allowed;
  for (const auto& [known, format] : formats()) {
    if (known == name) return format;
    allowed += (allowed.empty() ? "" : ", ") + known;
  }
  throw std::invalid_argument("weight format '" + name + "' is unknown; allowed: " + allowed);
}

std::string weight_format_name(const WeightFormat& format) {
  if (format.ordered) {
    WeightFormat sorted = format;
    sorted.ordered = false;
    const std::string name = weight_format_name(sorted);
    return name == "custom" ? name : name + std::string(kOrdered);
  }
  for (const auto& [name, known] : formats()) {
    if (known == format) return name;
  }
  return "custom";
}

GateUpFormats parse_gate_up_formats(const std::string& name) {
  const size_t end = name.find(kBetween);
  const WeightFormat gate = parse_weight_format(name.substr(0, end));
  return {gate, end == std::string::npos ? gate : parse_weight_format(name.substr(end + 1))};
}

std::string gate_up_formats_name(const GateUpFormats& formats) {
  const std::string up = weight_format_name(formats.up);
  return formats.gate == formats.up ? up : weight_format_name(formats.gate) + kBetween + up;
}

void check_weight_format(const WeightFormat& format) {
  code_bits(format.code);
  scale_bytes(format.scale);
  const uint32_t size = format.group_size;
  if (size != 0 && size != 16 && size != 32 && size != 64 && size != 128) {
    refuse("group_size is " + std::to_string(size) + "; it must be 16, 32, 64, 128, or 0 without group scales");
  }
  if (size != 0 && format.scale == ScaleType::kNone) {
    refuse("group_size is " + std::to_string(size) + " but there is no type of group scales");
  }
  if (size == 0 && format.scale != ScaleType::kNone) refuse("group scales have a type but group_size is 0");
  if (size == 0 && format.panel_scale) refuse("panel_scale needs group scales");
  if (format.zeros && format.code != Code::kInt4) refuse("zero points are supported for int4 codes only");
  if (format.zeros && size == 0) refuse("zero points need group scales");
  const bool integers = is_integer(format.code);
  if (format.mins && !integers) refuse("mins are supported for integer codes only");
  const bool products = format.scale == ScaleType::kProducts;
  if (format.mins && ((format.scale != ScaleType::kFloat16 && !products) || format.zeros || format.panel_scale ||
                      format.column_scale || format.quantised_rows)) {
    refuse("mins need a float16 scale, or a product, per column and group, and nothing else");
  }
  if (format.quantised_rows && format.code != Code::kInt8) refuse("quantised rows are supported for int8 codes only");
  const bool tabled = format.code >= Code::kIq4;
  if (products && (!(integers || tabled) || format.zeros || format.panel_scale || format.ordered || size > 32)) {
    refuse("scales that are products are supported for integer and iq codes in groups of 16 or 32 only, without zero "
           "points, panel_scale and order");
  }
  const bool in_bytes = format.code == Code::kInt4 || format.code == Code::kInt8;
  if (format.code > Code::kFloat4 && (size == 0 || format.panel_scale || format.column_scale ||
                                      (format.scale != ScaleType::kFloat16 && !products))) {
    refuse("codes of 2, 3, 5 and 6 bits and iq codes need a float16 scale, or a product, per column and group");
  }
  const bool by_16 = format.code == Code::kIq2Xs || format.code == Code::kIq2S || format.code == Code::kIq1M;
  const uint32_t grid_group = by_16 ? 16 : 32;
  if (is_grid(format.code) && (!products || size != grid_group)) {
    refuse("rows of a grid need products as scales, of groups of " + std::to_string(grid_group));
  }
  if (format.ordered && (size == 0 || !in_bytes)) {
    refuse("an order is supported for int4 and int8 codes with group scales only");
  }
}

}  // namespace moebius
