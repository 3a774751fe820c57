#include "kernels/bindings/source_arrays.h"

#include <map>
#include <stdexcept>

#include "kernels/format/pack.h"
#include "kernels/format/source_access.h"

namespace py = pybind11;

namespace moebius {
namespace {

const std::map<std::string, SourceLayout> kLayouts = {
    {"plain", SourceLayout::kPlain},        {"compressed_int4", SourceLayout::kCompressedInt4},
    {"awq_int4", SourceLayout::kAwqInt4},   {"gptq_int4", SourceLayout::kGptqInt4},
    {"mxfp4", SourceLayout::kMxfp4},        {"nvfp4", SourceLayout::kNvfp4},
    {"grid_words", SourceLayout::kGridWords},
};

template <class Enum>
std::map<std::string, Enum> by_name(const char* (*name)(Enum), Enum first, Enum last) {
  std::map<std::string, Enum> found;
  for (int value = static_cast<int>(first); value <= static_cast<int>(last); ++value) {
    found.emplace(name(static_cast<Enum>(value)), static_cast<Enum>(value));
  }
  return found;
}

const auto kCodes = by_name(&code_name, Code::kFloat32, Code::kTq1);
const auto kScaleTypes = by_name(&scale_name, ScaleType::kFloat32, ScaleType::kProducts);

// As str(array.dtype), which costs several microseconds because it is Python code.
std::string dtype_name(const py::array& array) {
  const char kind = array.dtype().kind();
  const char* name = kind == 'f' ? "float" : kind == 'i' ? "int" : kind == 'u' ? "uint" : nullptr;
  if (name == nullptr || !array.dtype().attr("isnative").cast<bool>()) return py::str(array.dtype());
  return name + std::to_string(8 * array.itemsize());
}

class Reader {
 public:
  Reader(const py::object& source, const std::string& name) : source_(source), name_(name) {}

  SourceArrays read() {
    read_codes(py::isinstance<py::array>(source_) ? source_ : py::object(source_.attr("codes")));
    if (!py::isinstance<py::array>(source_)) {
      read_scales();
      read_zeros();
      read_mins();
      read_columns();
      read_order();
    }
    try {
      check_source(matrix());
    } catch (const std::invalid_argument& error) {
      fail("", error.what());
    }
    return std::move(result_);
  }

 private:
  SourceMatrix& matrix() { return result_.matrix; }

  [[noreturn]] void fail(const std::string& field, const std::string& what) const {
    throw std::invalid_argument(name_ + (field.empty() ? "" : "." + field) + ": " + what);
  }

  template <class T>
  T lookup(const std::map<std::string, T>& table, const char* field, const std::string& value) const {
    const auto found = table.find(value);
    if (found != table.end()) return found->second;
    std::string allowed;
    for (const auto& [known, unused] : table) allowed += (allowed.empty() ? "" : ", ") + known;
    fail(field, "'" + value + "' is unknown; allowed: " + allowed);
  }

  // A 2-D array of one of the dtypes; `row_contiguous`: neighbours along the last axis are adjacent in memory.
  py::array array_2d(const py::object& value, const char* field, const std::string& dtypes, bool row_contiguous) {
    if (!py::isinstance<py::array>(value)) fail(field, "it must be a numpy array");
    const auto array = py::reinterpret_borrow<py::array>(value);
    if (array.ndim() != 2) fail(field, "it has " + std::to_string(array.ndim()) + " dimensions; it must have 2");
    const std::string dtype = dtype_name(array);
    if ((" " + dtypes + " ").find(" " + dtype + " ") == std::string::npos) {
      fail(field, "its dtype is " + dtype + "; allowed: " + dtypes);
    }
    const py::ssize_t size = array.itemsize();
    if (row_contiguous && array.shape(1) > 1 && array.strides(1) != size) {
      fail(field, "it must be contiguous along its last axis");
    }
    if (array.strides(0) % size != 0 || array.strides(1) % size != 0) fail(field, "its strides are no whole elements");
    result_.arrays.push_back(array);
    return array;
  }

  static ptrdiff_t stride(const py::array& array, int axis) { return array.strides(axis) / array.itemsize(); }

  void check_extent(const char* field, const py::array& array, py::ssize_t first, py::ssize_t second) const {
    if (array.shape(0) >= first && array.shape(1) >= second) return;
    fail(field, "its shape is [" + std::to_string(array.shape(0)) + ", " + std::to_string(array.shape(1)) +
                    "]; it must be at least [" + std::to_string(first) + ", " + std::to_string(second) + "]");
  }

  py::object attribute(const char* field) const { return source_.attr(field); }

  uint32_t extent(const char* field, py::ssize_t held) const {
    py::ssize_t value = held;
    if (py::hasattr(source_, field) && !attribute(field).is_none()) value = attribute(field).cast<py::ssize_t>();
    if (value > 0 && value <= held && value <= INT32_MAX) return static_cast<uint32_t>(value);
    fail(field, std::to_string(value) + "; it must be 1 to " + std::to_string(held) + ", which the codes hold");
  }

  void read_codes(const py::object& codes) {
    SourceMatrix& m = matrix();
    if (!py::isinstance<py::array>(source_)) {
      m.layout = lookup(kLayouts, "layout", attribute("layout").cast<std::string>());
    }
    if (m.layout == SourceLayout::kPlain) return read_plain(codes);
    if (m.layout == SourceLayout::kGridWords) return read_grid(codes);
    const bool bytes = m.layout == SourceLayout::kMxfp4 || m.layout == SourceLayout::kNvfp4;
    m.code = bytes ? Code::kFloat4 : Code::kInt4;
    const py::array array = array_2d(codes, "codes", bytes ? "uint8" : "int32 uint32", true);
    m.data = array.data();
    m.row_stride = stride(array, 0);
    const py::ssize_t rows_per_unit = m.layout == SourceLayout::kAwqInt4 ? 8 : 1;
    const py::ssize_t cols_per_unit = m.layout == SourceLayout::kAwqInt4 ? 1 : bytes ? 2 : 8;
    const bool rows_first = bytes || m.layout == SourceLayout::kCompressedInt4;
    m.rows = extent("rows", array.shape(rows_first ? 0 : 1) * rows_per_unit);
    m.cols = extent("cols", array.shape(rows_first ? 1 : 0) * cols_per_unit);
  }

  void read_grid(const py::object& codes) {
    SourceMatrix& m = matrix();
    m.code = lookup(kCodes, "code", attribute("code").cast<std::string>());
    const py::array array = array_2d(codes, "codes", "int32 uint32", true);
    m.data = array.data();
    m.row_stride = stride(array, 0);
    m.rows = extent("rows", array.shape(0));
    m.cols = extent("cols", array.shape(1) / grid_source_words(m.code) * 32);
  }

  void read_plain(const py::object& codes) {
    SourceMatrix& m = matrix();
    const py::array array = array_2d(codes, "codes", "float32 float16 uint16 int8 uint8", false);
    const std::string dtype = dtype_name(array);
    std::string code = dtype == "uint16" ? "bfloat16" : dtype;
    if (!py::isinstance<py::array>(source_) && !attribute("code").is_none()) {
      code = attribute("code").cast<std::string>();
    } else if (dtype == "uint8") {
      fail("code", "uint8 elements need it: float8, float4, int4, or another code of fewer than 8 bits");
    }
    m.code = lookup(kCodes, "code", code);
    if (code_bits(m.code) > 8 ? code != (dtype == "uint16" ? "bfloat16" : dtype)
                              : dtype != (m.code == Code::kInt8 ? "int8" : "uint8")) {
      fail("code", "'" + code + "' can not be read from elements of dtype " + dtype);
    }
    m.data = array.data();
    m.row_stride = stride(array, 0);
    m.col_stride = stride(array, 1);
    m.rows = extent("rows", array.shape(0));
    m.cols = extent("cols", array.shape(1));
  }

  uint32_t count(const char* field, uint32_t least) const {
    const auto value = attribute(field).cast<py::ssize_t>();
    if (value >= static_cast<py::ssize_t>(least) && value <= INT32_MAX) return static_cast<uint32_t>(value);
    fail(field, std::to_string(value) + "; it must be at least " + std::to_string(least));
  }

  bool groups_first() const {
    return result_.matrix.layout == SourceLayout::kAwqInt4 || result_.matrix.layout == SourceLayout::kGptqInt4;
  }

  py::ssize_t groups() const {
    return (result_.matrix.cols + result_.matrix.group_size - 1) / result_.matrix.group_size;
  }

  void read_scales() {
    SourceMatrix& m = matrix();
    m.group_size = count("group_size", 0);
    m.scale_rows = count("scale_rows", 1);
    m.scale_row_begin = count("scale_row_begin", 0);
    if (attribute("scales").is_none()) {
      if (m.group_size != 0) fail("scales", "group_size is " + std::to_string(m.group_size) + " but they are None");
      return;
    }
    if (m.group_size == 0) fail("group_size", "it is 0 but there are group scales");
    const py::array array = array_2d(attribute("scales"), "scales", "float32 float16 uint16 uint8 int32", false);
    const std::string dtype = dtype_name(array);
    std::string type = dtype == "uint16" ? "bfloat16" : dtype;
    if (!attribute("scale_type").is_none()) type = attribute("scale_type").cast<std::string>();
    if (dtype == "uint8" && type == "uint8") fail("scale_type", "uint8 scales need it: e8m0 or e4m3");
    if (dtype == "int32" && type == "int32") fail("scale_type", "int32 scales need it: products");
    m.scale_type = lookup(kScaleTypes, "scale_type", type);
    const bool float16 = m.scale_type == ScaleType::kFloat16;
    const bool products = m.scale_type == ScaleType::kProducts;
    const py::ssize_t bytes = products ? 4 : scale_bytes(m.scale_type);
    if (bytes != array.itemsize() || (dtype == "float16") != float16 || (dtype == "int32") != products) {
      fail("scale_type", "'" + type + "' can not be read from scales of dtype " + dtype);
    }
    const py::ssize_t scale_rows = (py::ssize_t{m.rows} + m.scale_row_begin + m.scale_rows - 1) / m.scale_rows;
    groups_first() ? check_extent("scales", array, groups(), scale_rows)
                   : check_extent("scales", array, scale_rows, groups());
    m.scales = array.data();
    m.scale_row_stride = stride(array, groups_first() ? 1 : 0);
    m.scale_group_stride = stride(array, groups_first() ? 0 : 1);
  }

  void read_zeros() {
    SourceMatrix& m = matrix();
    m.zeros_offset = attribute("zeros_offset").cast<int32_t>();
    if (attribute("zeros").is_none()) return;
    if (m.group_size == 0) fail("zeros", "zero points need group scales");
    const bool plain = m.layout == SourceLayout::kPlain;
    const py::array array = array_2d(attribute("zeros"), "zeros", plain ? "uint8" : "int32 uint32", true);
    const py::ssize_t rows = plain ? m.rows : (m.rows + 7) / 8;
    groups_first() ? check_extent("zeros", array, groups(), rows) : check_extent("zeros", array, rows, groups());
    m.zeros = array.data();
    m.zeros_stride = stride(array, 0);
  }

  void read_mins() {
    SourceMatrix& m = matrix();
    if (attribute("mins").is_none()) return;
    if (m.group_size == 0) fail("mins", "they need group scales");
    const py::array scales = array_2d(attribute("scales"), "scales", "float32 float16 uint16 int32", false);
    const py::array array = array_2d(attribute("mins"), "mins", dtype_name(scales), false);
    const bool alike = array.shape(0) == scales.shape(0) && array.shape(1) == scales.shape(1) &&
                       array.strides(0) == scales.strides(0) && array.strides(1) == scales.strides(1);
    if (!alike) fail("mins", "they must lie in memory as the scales do");
    m.mins = array.data();
  }

  const float* floats_per_row(const char* field) {
    const py::object value = attribute(field);
    if (value.is_none()) return nullptr;
    if (!py::isinstance<py::array_t<float>>(value)) fail(field, "it must be a numpy array of float32");
    const auto array = py::array_t<float, py::array::c_style>::ensure(value);
    if (array.ndim() != 1 || array.shape(0) != static_cast<py::ssize_t>(matrix().rows)) {
      fail(field, "it must have shape [" + std::to_string(matrix().rows) + "]");
    }
    result_.arrays.push_back(array);
    return array.data();
  }

  void read_order() {
    const py::object value = attribute("order");
    if (value.is_none()) return;
    if (!py::isinstance<py::array_t<uint32_t>>(value)) fail("order", "it must be a numpy array of uint32");
    const auto array = py::array_t<uint32_t, py::array::c_style>::ensure(value);
    if (array.ndim() != 1 || array.shape(0) != static_cast<py::ssize_t>(matrix().cols)) {
      fail("order", "it must have shape [" + std::to_string(matrix().cols) + "]");
    }
    result_.arrays.push_back(array);
    matrix().order = array.data();
  }

  void read_columns() {
    matrix().column_scale = floats_per_row("column_scale");
    matrix().tensor_scale = attribute("tensor_scale").cast<float>();
    matrix().bias = floats_per_row("bias");
  }

  const py::object& source_;
  const std::string& name_;
  SourceArrays result_;
};

}  // namespace

SourceArrays read_source(const py::object& source, const std::string& name) { return Reader(source, name).read(); }

}  // namespace moebius
