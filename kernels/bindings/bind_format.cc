#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/bindings/source_arrays.h"
#include "kernels/format/dequantise.h"
#include "kernels/format/expert_packing.h"
#include "kernels/format/gguf_blocks.h"
#include "kernels/format/grids.h"
#include "kernels/format/pack.h"
#include "kernels/format/requantise.h"
#include "kernels/moe/weight_segment.h"

namespace py = pybind11;

namespace moebius {
namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;

uint32_t panels_of(uint32_t rows) { return (rows + kPanelColumns - 1) / kPanelColumns; }

uint32_t positive(int64_t value, const char* name) {
  if (value > 0 && value <= INT32_MAX) return static_cast<uint32_t>(value);
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be 1 to 2147483647");
}

Bytes pack_matrix(const std::string& format, const py::object& source, bool has_bias, bool reference) {
  const SourceArrays arrays = read_source(source, "source");
  const PanelLayout layout(parse_weight_format(format), arrays.matrix.cols, has_bias || arrays.matrix.bias != nullptr);
  const uint32_t panels = panels_of(arrays.matrix.rows);
  Bytes packed(static_cast<py::ssize_t>(panels * layout.panel_bytes));
  auto* const target = reinterpret_cast<std::byte*>(packed.mutable_data());
  const ReleasedGil release;
  for (uint32_t panel = 0; panel < panels; ++panel) {
    (reference ? pack_panel_reference : pack_panel)(arrays.matrix, layout, panel, target + panel * layout.panel_bytes);
  }
  return packed;
}

struct Packed {
  Packed(const std::string& format, const Bytes& packed, int64_t num_rows, int64_t k, bool has_bias)
      : layout(parse_weight_format(format), positive(k, "k"), has_bias), rows(positive(num_rows, "rows")) {
    const auto wanted = static_cast<py::ssize_t>(panels_of(rows) * layout.panel_bytes);
    if (packed.ndim() == 1 && packed.shape(0) == wanted) return;
    throw std::invalid_argument("packed has " + std::to_string(packed.size()) + " bytes; " + format + " of [" +
                                std::to_string(num_rows) + ", " + std::to_string(k) + "] has " +
                                std::to_string(wanted));
  }
  PanelLayout layout;
  uint32_t rows;
};

// (weights [rows, k], bias [rows])
py::tuple unpack(const std::string& format, const Bytes& bytes, int64_t num_rows, int64_t k, bool has_bias) {
  const Packed packed(format, bytes, num_rows, k, has_bias);
  const uint32_t panels = panels_of(packed.rows);
  std::vector<float> weights(size_t{panels} * kPanelColumns * packed.layout.k);
  std::vector<float> bias(size_t{panels} * kPanelColumns);
  const auto* source = reinterpret_cast<const std::byte*>(bytes.data());
  {
    const ReleasedGil release;
    for (uint32_t panel = 0; panel < panels; ++panel) {
      const size_t column = size_t{panel} * kPanelColumns;
      unpack_panel(packed.layout, source + panel * packed.layout.panel_bytes, &weights[column * packed.layout.k],
                   &bias[column]);
    }
  }
  const auto rows = static_cast<py::ssize_t>(packed.rows);
  return py::make_tuple(py::array_t<float>({rows, static_cast<py::ssize_t>(k)}, weights.data()),
                        py::array_t<float>(rows, bias.data()));
}

py::object unpack_matrix(const std::string& format, const Bytes& bytes, int64_t rows, int64_t k, bool has_bias) {
  return unpack(format, bytes, rows, k, has_bias)[0];
}

py::object unpack_bias(const std::string& format, const Bytes& bytes, int64_t rows, int64_t k) {
  return unpack(format, bytes, rows, k, true)[1];
}

// (packed uint8, squared error, squared reference)
py::tuple requantise_matrix(const std::string& format, const py::object& source) {
  const SourceArrays arrays = read_source(source, "source");
  const SourceMatrix& matrix = arrays.matrix;
  const PanelLayout layout(parse_weight_format(format), matrix.cols, matrix.bias != nullptr);
  const uint32_t panels = (matrix.rows + kPanelColumns - 1) / kPanelColumns;
  py::array_t<uint8_t> packed(static_cast<py::ssize_t>(panels * layout.panel_bytes));
  auto* const target = reinterpret_cast<std::byte*>(packed.mutable_data());
  PackError sum;
  {
    const ReleasedGil release;
    for (uint32_t panel = 0; panel < panels; ++panel) {
      const PackError error = requantise_panel(matrix, layout, panel, target + panel * layout.panel_bytes);
      sum.squared_error += error.squared_error;
      sum.squared_reference += error.squared_reference;
    }
  }
  return py::make_tuple(packed, sum.squared_error, sum.squared_reference);
}

py::array_t<float> dequantise_matrix(const py::object& source) {
  const SourceArrays arrays = read_source(source, "source");
  const SourceMatrix& matrix = arrays.matrix;
  py::array_t<float> result({static_cast<py::ssize_t>(matrix.rows), static_cast<py::ssize_t>(matrix.cols)});
  float* const target = result.mutable_data();
  const ReleasedGil release;
  dequantise_rows(matrix, 0, matrix.rows, target, matrix.cols);
  return result;
}

// Memory for `count` bytes: the caller's, which may be used again, or new memory, whose pages come one by one.
Bytes memory_for(const std::optional<Bytes>& given, uint64_t count) {
  if (!given) return Bytes(static_cast<py::ssize_t>(count));
  if (given->ndim() != 1 || static_cast<uint64_t>(given->size()) != count) {
    throw py::value_error("into: " + std::to_string(given->size()) + " bytes, but the expert takes " +
                          std::to_string(count));
  }
  return *given;
}

// The matrices of one expert, kept alive; `gate` may be None.
struct ExpertArrays {
  ExpertArrays(const py::object& gate_source, const py::object& up_source, const py::object& down_source)
      : gated(!gate_source.is_none()),
        gate(gated ? read_source(gate_source, "gate") : SourceArrays{}),
        up(read_source(up_source, "up")),
        down(read_source(down_source, "down")) {}

  ExpertSource source() const { return {gate.matrix, up.matrix, down.matrix}; }
  ExpertLayout layout(const std::string& gate_up_format, const std::string& down_format, bool has_bias) const {
    return ExpertLayout(parse_gate_up_formats(gate_up_format), parse_weight_format(down_format), up.matrix.cols,
                        up.matrix.rows, gated, has_bias);
  }

  bool gated;
  SourceArrays gate, up, down;
};

// (packed bytes, squared error, squared reference); packed in `parts` pieces, one after the other.
py::tuple pack_expert_matrices(const std::string& gate_up_format, const std::string& down_format,
                               const py::object& gate, const py::object& up, const py::object& down, bool has_bias,
                               int64_t parts, const std::optional<Bytes>& into) {
  const ExpertArrays arrays(gate, up, down);
  const ExpertSource source = arrays.source();
  const ExpertLayout layout = arrays.layout(gate_up_format, down_format, has_bias);
  const uint64_t count = positive(parts, "parts");
  const uint64_t total = expert_parts(layout);
  Bytes packed = memory_for(into, layout.expert_bytes);
  auto* const target = reinterpret_cast<std::byte*>(packed.mutable_data());
  PackError sum;
  {
    const ReleasedGil release;
    for (uint64_t part = 0; part < count; ++part) {
      const auto begin = static_cast<uint32_t>(part * total / count);
      const auto end = static_cast<uint32_t>((part + 1) * total / count);
      const PackError error = pack_expert_parts(layout, source, begin, end, target);
      sum.squared_error += error.squared_error;
      sum.squared_reference += error.squared_reference;
    }
  }
  return py::make_tuple(packed, sum.squared_error, sum.squared_reference);
}

void check_lengths(size_t found, size_t wanted, const char* name) {
  if (found == wanted) return;
  throw std::invalid_argument(std::string(name) + " are " + std::to_string(found) + ", experts " +
                              std::to_string(wanted));
}

using Checked = std::tuple<uint64_t, double, double>;

// (checksum, squared error, squared reference) of each expert, (gate, up, down), packed into memory of the caller's.
// Python's lock is taken once for all: threads that hand it to one another for each expert wait for that most of all.
std::vector<Checked> pack_experts(const std::string& gate_up_format, const std::string& down_format,
                                  const std::vector<std::array<py::object, 3>>& experts, bool has_bias,
                                  const std::vector<Bytes>& into, const std::vector<uint64_t>& seeds) {
  check_lengths(into.size(), experts.size(), "into");
  check_lengths(seeds.size(), experts.size(), "seeds");
  std::vector<ExpertArrays> arrays;
  std::vector<ExpertLayout> layouts;
  std::vector<std::byte*> targets;
  for (size_t i = 0; i < experts.size(); ++i) {
    const auto& [gate, up, down] = experts[i];
    layouts.push_back(arrays.emplace_back(gate, up, down).layout(gate_up_format, down_format, has_bias));
    Bytes memory = memory_for(into[i], layouts.back().expert_bytes);
    targets.push_back(reinterpret_cast<std::byte*>(memory.mutable_data()));
  }
  std::vector<Checked> found;
  const ReleasedGil release;
  for (size_t i = 0; i < experts.size(); ++i) {
    const PackError error = pack_expert(layouts[i], arrays[i].source(), targets[i]);
    const uint64_t checksum = weights::digest_of(targets[i], layouts[i].expert_bytes, seeds[i]);
    found.emplace_back(checksum, error.squared_error, error.squared_reference);
  }
  return found;
}

// The checksums of bytes that are copied from each of `sources` to `targets`, taken of the copies; the lock as above.
std::vector<uint64_t> copy_weights(const std::vector<Bytes>& sources, std::vector<Bytes>& targets,
                                   const std::vector<uint64_t>& seeds) {
  check_lengths(targets.size(), sources.size(), "targets");
  check_lengths(seeds.size(), sources.size(), "seeds");
  std::vector<std::byte*> to;
  for (size_t i = 0; i < sources.size(); ++i) {
    Bytes memory = memory_for(targets[i], static_cast<uint64_t>(sources[i].size()));
    to.push_back(reinterpret_cast<std::byte*>(memory.mutable_data()));
  }
  std::vector<uint64_t> found;
  const ReleasedGil release;
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto count = static_cast<size_t>(sources[i].size());
    std::memcpy(to[i], sources[i].data(), count);
    found.push_back(weights::digest_of(to[i], count, seeds[i]));
  }
  return found;
}

std::string reason_of(const std::string& format, const py::object& source) {
  return unsupported_reason(read_source(source, "source").matrix, parse_weight_format(format));
}

// By name, the fields of WeightFormat in moebius/kernels/weight_formats.py.
py::dict weight_formats() {
  py::dict result;
  for (const std::string& name : weight_format_names()) {
    const WeightFormat format = parse_weight_format(name);
    py::dict fields;
    fields["code"] = code_name(format.code);
    fields["bits"] = code_bits(format.code);
    fields["scale"] = format.scale == ScaleType::kNone ? py::object(py::none()) : py::str(scale_name(format.scale));
    fields["group_size"] = format.group_size;
    fields["panel_scale"] = format.panel_scale;
    fields["zeros"] = format.zeros;
    fields["mins"] = format.mins;
    fields["column_scale"] = format.column_scale;
    fields["quantised_rows"] = format.quantised_rows;
    fields["ordered"] = format.ordered;
    result[py::str(name)] = fields;
  }
  return result;
}

// The fields that PanelLayout of moebius/kernels/weight_formats.py adds to its format's.
py::dict panel_layout(const std::string& format, int64_t k, bool has_bias) {
  const PanelLayout layout(parse_weight_format(format), positive(k, "k"), has_bias);
  py::dict result;
  result["k"] = layout.k;
  result["has_bias"] = layout.has_bias;
  result["k_padded"] = layout.k_padded;
  result["groups"] = layout.groups;
  result["factor_groups"] = layout.factor_groups;
  result["whole_offset"] = layout.whole_offset;
  result["signs_offset"] = layout.signs_offset;
  result["whole_low_bits"] = layout.whole_low_bits;
  result["whole_high_bits"] = layout.whole_high_bits;
  result["whole_high_offset"] = layout.whole_high_offset;
  result["joined"] = layout.joined;
  result["scales_offset"] = layout.scales_offset;
  result["zeros_offset"] = layout.zeros_offset;
  result["mins_offset"] = layout.mins_offset;
  result["column_scale_offset"] = layout.column_scale_offset;
  result["bias_offset"] = layout.bias_offset;
  result["panel_bytes"] = layout.panel_bytes;
  return result;
}

// The fields of PackedExpertLayout in moebius/kernels/weight_formats.py, but for its panels.
py::dict expert_layout(const std::string& gate_up_format, const std::string& down_format, int64_t hidden_size,
                       int64_t intermediate_size, bool gated, bool has_bias) {
  const ExpertLayout layout(parse_gate_up_formats(gate_up_format), parse_weight_format(down_format),
                            positive(hidden_size, "hidden_size"), positive(intermediate_size, "intermediate_size"),
                            gated, has_bias);
  py::dict result;
  result["gated"] = layout.gated;
  result["panels_per_column_block"] = layout.panels_per_column_block;
  result["intermediate_blocks"] = layout.intermediate_blocks;
  result["down_panels"] = layout.down_panels;
  result["mixed"] = layout.mixed;
  result["gate_step"] = layout.gate_step;
  result["up_offset"] = layout.up_offset;
  result["up_step"] = layout.up_step;
  result["down_offset"] = layout.down_offset;
  result["order_offset"] = layout.order_offset;
  result["expert_bytes"] = layout.expert_bytes;
  return result;
}

// uint8 [rows, 4 or 8], see grids.h.
py::array_t<uint8_t> rows_of_grid(const std::string& code) {
  std::string allowed;
  for (const Code each : {Code::kIq3Xxs, Code::kIq3S, Code::kIq2Xxs, Code::kIq2Xs, Code::kIq2S, Code::kIq1S,
                          Code::kIq1M}) {
    const GridRows rows = grid_rows(each);
    const std::vector<py::ssize_t> shape{rows.count, rows.width};
    if (code == code_name(each)) return py::array_t<uint8_t>(shape, static_cast<const uint8_t*>(rows.rows));
    allowed += (allowed.empty() ? "" : ", ") + std::string(code_name(each));
  }
  throw std::invalid_argument("code '" + code + "' has no grid; allowed: " + allowed);
}

// Without Python's lock: threads that load an expert each would wait for one another.
void take_gguf_part(const std::string& type, const std::string& name, const py::array_t<uint8_t>& blocks,
                    const py::array& output) {
  const GgufPart& part = gguf_part(type, name);
  if (blocks.ndim() != 2 || blocks.shape(1) % part.block_bytes != 0 ||
      (blocks.size() != 0 && blocks.shape(1) > 1 && blocks.strides(1) != 1)) {
    throw std::invalid_argument("blocks must be [rows, bytes], each row of whole blocks of " +
                                std::to_string(part.block_bytes) + " bytes that follow one another");
  }
  const py::ssize_t count = blocks.shape(1) / part.block_bytes;
  const py::ssize_t bytes = blocks.shape(0) * count * part.part_bytes;
  if (output.nbytes() != bytes || (output.flags() & py::array::c_style) == 0 || !output.writeable()) {
    throw std::invalid_argument("output has " + std::to_string(output.nbytes()) + " bytes; it must be C-contiguous, " +
                                "writeable and have " + std::to_string(bytes));
  }
  const GgufRows rows{reinterpret_cast<const std::byte*>(blocks.data()), blocks.strides(0),
                      static_cast<uint32_t>(blocks.shape(0)), static_cast<uint32_t>(count)};
  auto* const target = static_cast<std::byte*>(const_cast<void*>(output.data()));
  const ReleasedGil release;
  part.take(rows, target);
}

}  // namespace

void bind_format(py::module_& m) {
  m.def("weight_formats", &weight_formats);
  m.def("panel_layout", &panel_layout, py::arg("format"), py::arg("k"), py::arg("has_bias") = false);
  m.def("expert_layout", &expert_layout, py::arg("gate_up_format"), py::arg("down_format"), py::arg("hidden_size"),
        py::arg("intermediate_size"), py::arg("gated"), py::arg("has_bias"));
  m.attr("PANEL_COLUMNS") = kPanelColumns;
  m.def("unsupported_reason", &reason_of, py::arg("format"), py::arg("source"));
  m.def("pack_matrix", &pack_matrix, py::arg("format"), py::arg("source"), py::kw_only(), py::arg("has_bias") = false,
        py::arg("reference") = false);
  m.def("pack_expert", &pack_expert_matrices, py::arg("gate_up_format"), py::arg("down_format"), py::arg("gate"),
        py::arg("up"), py::arg("down"), py::kw_only(), py::arg("has_bias") = false, py::arg("parts") = 1,
        py::arg("into").noconvert() = py::none());
  m.def("pack_experts", &pack_experts, py::arg("gate_up_format"), py::arg("down_format"), py::arg("experts"),
        py::kw_only(), py::arg("has_bias") = false, py::arg("into").noconvert(), py::arg("seeds"));
  m.def("copy_weights", &copy_weights, py::arg("sources").noconvert(), py::arg("targets").noconvert(),
        py::arg("seeds"));
  m.def("unpack_matrix", &unpack_matrix, py::arg("format"), py::arg("packed").noconvert(), py::arg("rows"),
        py::arg("k"), py::arg("has_bias") = false);
  m.def("unpack_bias", &unpack_bias, py::arg("format"), py::arg("packed").noconvert(), py::arg("rows"), py::arg("k"));
  m.def("requantise_matrix", &requantise_matrix, py::arg("format"), py::arg("source"));
  m.def("dequantise_matrix", &dequantise_matrix, py::arg("source"));
  m.def("grid_rows", &rows_of_grid, py::arg("code"));
  m.def("take_gguf_part", &take_gguf_part, py::arg("type"), py::arg("part"), py::arg("blocks").noconvert(),
        py::arg("output").noconvert());
}

}  // namespace moebius
