// Single GEMMs and vector kernels, for tests and benchmarks: the engine calls them without Python.
#include <pybind11/stl.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/bindings/numpy_checks.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/moe/engine_options.h"
#include "kernels/testing/bindings.h"
#include "kernels/testing/gemm_emulated.h"

namespace py = pybind11;

namespace moebius {
namespace {

constexpr uint32_t kMaxPanels = 1u << 20;

uint32_t count_option(int64_t value, const char* name, int64_t least, int64_t most) {
  if (value >= least && value <= most) return static_cast<uint32_t>(value);
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be " +
                              std::to_string(least) + " to " + std::to_string(most));
}

struct Free {
  void operator()(std::byte* at) const { std::free(at); }
};
using AlignedBytes = std::unique_ptr<std::byte, Free>;

// Zeros, aligned as kernels want them.
AlignedBytes aligned_zeros(size_t bytes) {
  const size_t rounded = (bytes + 63) / 64 * 64 + 64;
  AlignedBytes buffer(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
  if (buffer == nullptr) throw std::bad_alloc();
  std::memset(buffer.get(), 0, rounded);
  return buffer;
}

AlignedBytes aligned_copy(const py::array& source) {
  AlignedBytes buffer = aligned_zeros(source.nbytes());
  std::memcpy(buffer.get(), source.data(), source.nbytes());
  return buffer;
}

struct RowDtype {
  const char* text;
  size_t bytes;
};

RowDtype row_dtype(RowType type) {
  switch (type) {
    case RowType::kFloat32: return {"float32", 4};
    case RowType::kBFloat16: return {"uint16 (bfloat16 bits)", 2};
    case RowType::kInt8: return {"int8", 1};
  }
  return {"", 0};
}

py::array contiguous_rows(const py::array& rows, RowType type) {
  if (rows.ndim() != 2 || rows.shape(0) == 0) {
    const std::vector<py::ssize_t> shape(rows.shape(), rows.shape() + rows.ndim());
    throw std::invalid_argument("rows has shape " + shape_text(shape) + "; it must be [rows > 0, k]");
  }
  switch (type) {
    case RowType::kFloat32: return contiguous<float>(rows, "rows", row_dtype(type).text);
    case RowType::kBFloat16: return contiguous<uint16_t>(rows, "rows", row_dtype(type).text);
    case RowType::kInt8: break;
  }
  return contiguous<int8_t>(rows, "rows", row_dtype(type).text);
}

// Rows prepared as the engine prepares them: [count][k_padded], zero padded and aligned.
struct PreparedRows {
  // Not equally spaced: backwards.
  PreparedRows(const py::array& source, RowType type, uint32_t k_padded, bool equally_spaced)
      : stride((k_padded * row_dtype(type).bytes + 63) / 64 * 64),
        data(aligned_zeros(stride * static_cast<size_t>(source.shape(0)))) {
    const size_t bytes = static_cast<size_t>(source.shape(1)) * row_dtype(type).bytes;
    for (py::ssize_t row = 0; row < source.shape(0); ++row) {
      std::byte* const target = data.get() + (equally_spaced ? row : source.shape(0) - 1 - row) * stride;
      std::memcpy(target, static_cast<const std::byte*>(source.data()) + row * bytes, bytes);
      pointers.push_back(target);
    }
    if (!equally_spaced) stride = 0;
  }

  // As the kernel wants them, where it makes something of its own of rows.
  void prepare_for(const GemmKernel& kernel, const PanelLayout& layout) {
    if (kernel.prepare_row == nullptr) return;
    const size_t bytes = (kernel.prepared_row_bytes(layout) + 63) / 64 * 64;
    AlignedBytes made = aligned_zeros(bytes * pointers.size());
    for (size_t row = 0; row < pointers.size(); ++row) {
      kernel.prepare_row(layout, pointers[row], made.get() + row * bytes);
      pointers[row] = made.get() + row * bytes;
    }
    data = std::move(made);
  }

  size_t stride;
  AlignedBytes data;
  std::vector<const void*> pointers;
};

std::vector<float> checked_row_scales(const py::object& row_scales, RowType type, py::ssize_t num_rows) {
  if (type != RowType::kInt8) {
    if (row_scales.is_none()) return {};
    throw std::invalid_argument("row_scales is given; it must be None unless rows are int8");
  }
  if (row_scales.is_none()) throw std::invalid_argument("row_scales is None; it must be float32 [rows] for int8 rows");
  const auto scales = contiguous<float>(row_scales.cast<py::array>(), "row_scales", "float32");
  check_shape(scales, "row_scales", {num_rows});
  return {scales.data(), scales.data() + num_rows};
}

const GemmKernel& checked_kernel(const std::string& name, const WeightFormat& format,
                                    const std::string& format_name) {
  const GemmKernel& kernel = gemm_by_name(name.c_str(), testable_gemms());
  if (kernel.supports(format)) return kernel;
  throw std::invalid_argument("kernel '" + name + "' does not support the weight format '" + format_name + "'");
}

py::array_t<float> gemm(const std::string& kernel_name, const std::string& format_name, const py::array& packed,
                           int64_t k, int64_t num_panels, bool has_bias, const py::array& rows,
                           const py::object& row_scales, bool equally_spaced) {
  const PanelLayout layout(parse_weight_format(format_name), count_option(k, "k", 1, INT32_MAX), has_bias);
  const GemmKernel& kernel = checked_kernel(kernel_name, layout.format, format_name);
  const uint32_t panels = count_option(num_panels, "num_panels", 1, kMaxPanels);
  const auto weights = contiguous<uint8_t>(packed, "packed", "uint8");
  check_shape(weights, "packed", {static_cast<py::ssize_t>(panels * layout.panel_bytes)});
  const py::array checked_rows = contiguous_rows(rows, kernel.row_type);
  const py::ssize_t num_rows = checked_rows.shape(0);
  check_shape(checked_rows, "rows", {num_rows, static_cast<py::ssize_t>(layout.k)});
  const std::vector<float> scales = checked_row_scales(row_scales, kernel.row_type, num_rows);

  const AlignedBytes panel_copy = aligned_copy(weights);
  PreparedRows prepared(checked_rows, kernel.row_type, layout.k_padded, equally_spaced);
  prepared.prepare_for(kernel, layout);
  const size_t columns = size_t{panels} * kPanelColumns;
  const AlignedBytes result = aligned_zeros(columns * num_rows * sizeof(float));
  const auto count = static_cast<uint32_t>(num_rows);
  const AlignedBytes scratch = aligned_zeros(kernel.scratch_bytes(layout, panels, count));
  const GemmWork work{&layout, panel_copy.get(), panels, prepared.pointers.data(), prepared.stride,
                         scales.data(), count, reinterpret_cast<float*>(result.get()), columns, scratch.get()};
  {
    const ReleasedGil release;
    kernel.run(work);
  }
  py::array_t<float> output({num_rows, static_cast<py::ssize_t>(columns)});
  std::memcpy(output.mutable_data(), result.get(), columns * num_rows * sizeof(float));
  return output;
}

std::vector<std::string> gemm_names() {
  std::vector<std::string> names;
  for (const GemmKernel* kernel : testable_gemms()) names.emplace_back(kernel->name);
  return names;
}

// Kernels that can compute `format_name` from rows of `row_type` at any level of this machine.
std::vector<std::string> gemms_for(const std::string& format_name, const std::string& row_type) {
  const WeightFormat format = parse_weight_format(format_name);
  std::vector<std::string> names;
  for (const GemmKernel* kernel : testable_gemms()) {
    const char* const type = kernel->row_type == RowType::kFloat32    ? "float32"
                             : kernel->row_type == RowType::kBFloat16 ? "bfloat16"
                                                                      : "int8";
    if (row_type == type && kernel->supports(format)) names.emplace_back(kernel->name);
  }
  return names;
}

const VectorKernels& kernels_of(const std::string& isa) { return vector_kernels(resolve_isa(isa)); }

// result[rows][blocks * 32 (relu2: 16)] -> [rows][blocks * 16], float32 or the bits of bfloat16.
py::array activate(const std::string& isa, const std::string& activation, float alpha, float limit,
                   const py::array& result, bool to_bfloat16) {
  const Activation kind = parse_activation(activation);
  const py::ssize_t block = kind == Activation::kRelu2 ? 16 : 32;
  const auto source = contiguous<float>(result, "result", "float32");
  if (source.ndim() != 2 || source.shape(1) % block != 0) {
    throw std::invalid_argument("result must be [rows, a multiple of " + std::to_string(block) + "]");
  }
  const py::ssize_t rows = source.shape(0);
  const py::ssize_t columns = source.shape(1) / block * 16;
  const AlignedBytes input = aligned_copy(source);
  const AlignedBytes output = aligned_zeros(rows * columns * sizeof(float));
  const ActivationWork work{kind, alpha, limit, reinterpret_cast<const float*>(input.get()),
                            static_cast<size_t>(source.shape(1)), static_cast<uint32_t>(rows),
                            static_cast<uint32_t>(columns / 16), output.get(), static_cast<size_t>(columns)};
  const VectorKernels& kernels = kernels_of(isa);
  (to_bfloat16 ? kernels.activate_bfloat16 : kernels.activate_float32)(work);
  py::array target = to_bfloat16 ? py::array(py::array_t<uint16_t>({rows, columns}))
                                 : py::array(py::array_t<float>({rows, columns}));
  std::memcpy(target.mutable_data(), output.get(), target.nbytes());
  return target;
}

void scatter(const std::string& isa, const py::array& result, const py::array& row_ids, const py::array& weights,
             py::array_t<float, py::array::c_style> output) {
  if (result.ndim() != 2 || output.ndim() != 2) {
    throw std::invalid_argument("result and output must be [rows, columns]");
  }
  const auto source = contiguous<float>(result, "result", "float32");
  const auto ids = contiguous<uint32_t>(row_ids, "row_ids", "uint32");
  const auto scales = contiguous<float>(weights, "weights", "float32");
  check_shape(ids, "row_ids", {source.shape(0)});
  check_shape(scales, "weights", {source.shape(0)});
  if (source.shape(1) < output.shape(1)) throw std::invalid_argument("result has fewer columns than output");
  for (py::ssize_t i = 0; i < ids.size(); ++i) count_option(ids.data()[i], "row_ids", 0, output.shape(0) - 1);
  const ScatterWork work{source.data(), static_cast<size_t>(source.shape(1)), ids.data(), scales.data(),
                         static_cast<uint32_t>(source.shape(0)), static_cast<uint32_t>(output.shape(1)),
                         output.mutable_data(), static_cast<size_t>(output.shape(1))};
  kernels_of(isa).scatter(work);
}

template <class From, class To>
py::array_t<To> convert(void (*run)(const From*, To*, size_t), const py::array& source, const char* wanted) {
  const auto checked = contiguous<From>(source, "source", wanted);
  py::array_t<To> target(std::vector<py::ssize_t>(checked.shape(), checked.shape() + checked.ndim()));
  run(checked.data(), target.mutable_data(), static_cast<size_t>(checked.size()));
  return target;
}

void bind_vector_kernels(py::module_& m) {
  m.def("activate", &activate, py::arg("isa"), py::arg("activation"), py::arg("alpha"), py::arg("limit"),
        py::arg("result"), py::arg("to_bfloat16"));
  m.def("scatter", &scatter, py::arg("isa"), py::arg("result"), py::arg("row_ids"), py::arg("weights"),
        py::arg("output").noconvert());
  m.def("bfloat16_to_float32", [](const std::string& isa, const py::array& source) {
    return convert(kernels_of(isa).bfloat16_to_float32, source, "uint16 (bfloat16 bits)");
  }, py::arg("isa"), py::arg("source"));
  m.def("float16_to_float32", [](const std::string& isa, const py::array& source) {
    return convert(kernels_of(isa).float16_to_float32, source, "uint16 (float16 bits)");
  }, py::arg("isa"), py::arg("source"));
  m.def("float32_to_bfloat16", [](const std::string& isa, const py::array& source) {
    return convert(kernels_of(isa).float32_to_bfloat16, source, "float32");
  }, py::arg("isa"), py::arg("source"));
  m.def("quantise_row", [](const std::string& isa, const py::array& source) {
    const auto checked = contiguous<float>(source, "source", "float32");
    py::array_t<int8_t> target(checked.size());
    const float scale = kernels_of(isa).quantise_row(checked.data(), target.mutable_data(), checked.size());
    return std::make_pair(target, scale);
  }, py::arg("isa"), py::arg("source"));
  m.def("count_nonfinite", [](const std::string& isa, const py::array& source) {
    const auto checked = contiguous<float>(source, "source", "float32");
    return kernels_of(isa).count_nonfinite(checked.data(), checked.size());
  }, py::arg("isa"), py::arg("source"));
}

}  // namespace

void bind_gemm(py::module_& m) {
  m.def("gemm_names", &gemm_names);
  m.def(
      "gemm_kernel", [](const std::string& name) { return &gemm_by_name(name.c_str(), testable_gemms()); },
      py::arg("name"), py::return_value_policy::reference);
  m.def("gemms_for", &gemms_for, py::arg("format_name"), py::arg("row_type"));
  m.def("gemm", &gemm, py::arg("kernel_name"), py::arg("format_name"), py::arg("packed"), py::arg("k"),
        py::arg("num_panels"), py::arg("has_bias"), py::arg("rows"), py::arg("row_scales") = py::none(),
        py::arg("equally_spaced") = true);
  bind_vector_kernels(m);
}

}  // namespace moebius
