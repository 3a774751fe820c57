#include <pybind11/pybind11.h>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/source_arrays.h"
#include "kernels/format/requantise.h"

namespace py = pybind11;

namespace moebius {
namespace {

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
    const py::gil_scoped_release release;
    for (uint32_t panel = 0; panel < panels; ++panel) {
      const PackError error = requantise_panel(matrix, layout, panel, target + panel * layout.panel_bytes);
      sum.squared_error += error.squared_error;
      sum.squared_reference += error.squared_reference;
    }
  }
  return py::make_tuple(packed, sum.squared_error, sum.squared_reference);
}

}  // namespace

void bind_requantise(py::module_& m) {
  m.def("requantise_matrix", &requantise_matrix, py::arg("format"), py::arg("source"));
}

}  // namespace moebius
