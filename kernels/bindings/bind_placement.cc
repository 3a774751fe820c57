#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/numpy_checks.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/placement/forecast.h"

namespace py = pybind11;

namespace moebius {
namespace {

using Sizes = std::vector<py::ssize_t>;

// [rows, experts] as `wanted` says, C-contiguous.
template <class T>
py::array_t<T, py::array::c_style> table(const py::array& array, const char* name, const char* dtype,
                                         const Sizes& wanted) {
  check_shape(array, name, wanted);
  return contiguous<T>(array, name, dtype);
}

const uint8_t* bytes_of(const py::array_t<bool, py::array::c_style>& flags) {
  return reinterpret_cast<const uint8_t*>(flags.data());
}

template <class T>
py::array_t<T> array_of(const std::vector<Exchange>& found, T Exchange::* field) {
  py::array_t<T> values(static_cast<py::ssize_t>(found.size()));
  for (size_t n = 0; n < found.size(); ++n) values.mutable_data()[n] = found[n].*field;
  return values;
}

// (rows, newcomers, leavers, gains)
py::tuple worthwhile(const py::array& expected, const py::array& resident, double copy_price) {
  if (expected.ndim() != 2) throw std::invalid_argument("expected must be [rows, experts]");
  const Sizes sizes{expected.shape(0), expected.shape(1)};
  const auto values = table<double>(expected, "expected", "float64", sizes);
  const auto flags = table<bool>(resident, "resident", "bool", sizes);
  std::vector<Exchange> found;
  {
    const ReleasedGil release;
    found = worthwhile_exchanges(values.data(), bytes_of(flags), static_cast<size_t>(sizes[0]),
                                 static_cast<size_t>(sizes[1]), copy_price);
  }
  return py::make_tuple(array_of(found, &Exchange::row), array_of(found, &Exchange::newcomer),
                        array_of(found, &Exchange::leaver), array_of(found, &Exchange::gain));
}

RoutingForecast make(const std::vector<double>& half_lives, const py::array& resident, double top_k) {
  if (resident.ndim() != 2 || resident.shape(1) == 0) {
    throw std::invalid_argument("resident must be [layers, experts], of one expert or more");
  }
  if (half_lives.empty() || !(top_k > 0)) {
    throw std::invalid_argument("a forecast needs one half-life or more, and top_k above 0");
  }
  const auto flags = contiguous<bool>(resident, "resident", "bool");
  return {half_lives, static_cast<size_t>(flags.shape(0)), static_cast<size_t>(flags.shape(1)), top_k, bytes_of(flags)};
}

Sizes sizes_of(const RoutingForecast& forecast) {
  return {static_cast<py::ssize_t>(forecast.num_layers()), static_cast<py::ssize_t>(forecast.num_experts())};
}

void observe(RoutingForecast& forecast, const py::array& decode, const py::array& prefill, double copy_price) {
  const Sizes sizes = sizes_of(forecast);
  const auto decoded = table<int64_t>(decode, "decode", "int64", sizes);
  const auto prompted = table<int64_t>(prefill, "prefill", "int64", sizes);
  const ReleasedGil release;
  forecast.observe(decoded.data(), prompted.data(), copy_price);
}

// (best [layers], expected [layers, experts], rates [layers, experts])
py::tuple forecast_of(const RoutingForecast& forecast) {
  const Sizes sizes = sizes_of(forecast);
  py::array_t<int64_t> best(sizes[0]);
  py::array_t<double> expected(sizes), rates(sizes);
  {
    int64_t* const chosen = best.mutable_data();
    double* const values = expected.mutable_data();
    double* const by_token = rates.mutable_data();
    const ReleasedGil release;
    forecast.forecast(chosen, values, by_token);
  }
  return py::make_tuple(best, expected, rates);
}

// A view of memory that lives as long as `owner`.
py::array_t<double> view(const py::object& owner, double* values, const Sizes& shape) {
  return py::array_t<double>(shape, values, owner);
}

}  // namespace

void bind_placement(py::module_& m) {
  m.def("worthwhile_exchanges", &worthwhile, py::arg("expected"), py::arg("resident"), py::arg("copy_price"));
  py::class_<RoutingForecast>(m, "RoutingForecast")
      .def(py::init(&make), py::arg("half_lives"), py::arg("resident"), py::arg("top_k"))
      .def("observe", &observe, py::arg("decode"), py::arg("prefill"), py::arg("copy_price"))
      .def("forecast", &forecast_of)
      .def_property_readonly("sums",
                             [](const py::object& self) {
                               auto& forecast = self.cast<RoutingForecast&>();
                               Sizes shape = sizes_of(forecast);
                               shape.insert(shape.begin(), static_cast<py::ssize_t>(forecast.num_half_lives()));
                               return view(self, forecast.sums(), shape);
                             })
      .def_property_readonly("tokens", [](const py::object& self) {
        auto& forecast = self.cast<RoutingForecast&>();
        return view(self, forecast.tokens(),
                    {static_cast<py::ssize_t>(forecast.num_half_lives()), sizes_of(forecast)[0]});
      });
}

}  // namespace moebius
