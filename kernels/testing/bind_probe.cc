#include <pybind11/stl.h>

#include "kernels/bindings/released_gil.h"
#include "kernels/isa/isa.h"
#include "kernels/testing/bindings.h"
#include "kernels/testing/probe.h"

namespace py = pybind11;

namespace moebius {
namespace {

using namespace probe;
using Unlocked = py::call_guard<ReleasedGil>;

PrefetchHint parse_hint(const std::string& name) {
  if (name == "t0") return PrefetchHint::kT0;
  if (name == "t1") return PrefetchHint::kT1;
  if (name == "nta") return PrefetchHint::kNta;
  throw std::invalid_argument("hint='" + name + "' is unknown; allowed: t0, t1, nta");
}

const char* row_type_name(RowType type) {
  switch (type) {
    case RowType::kFloat32: return "float32";
    case RowType::kBFloat16: return "bfloat16";
    case RowType::kInt8: return "int8";
  }
  return "unknown";
}

}  // namespace

void bind_probe(py::module_& m) {
  py::class_<BandwidthProbe>(m, "BandwidthProbe")
      .def(py::init([](const std::string& isa, const std::vector<int>& cpus, size_t nbytes, bool huge_pages) {
             return std::make_unique<BandwidthProbe>(resolve_isa(isa), cpus, nbytes, huge_pages);
           }),
           py::kw_only(), py::arg("isa"), py::arg("cpus"), py::arg("nbytes"), py::arg("huge_pages"), Unlocked())
      .def_property_readonly("nbytes", &BandwidthProbe::bytes)
      .def(
          "measure",
          [](BandwidthProbe& probe, size_t block_bytes, size_t prefetch_bytes, const std::string& hint,
             uint32_t passes) { return probe.measure({block_bytes, prefetch_bytes, parse_hint(hint)}, passes); },
          py::kw_only(), py::arg("block_bytes"), py::arg("prefetch_bytes"), py::arg("hint"), py::arg("passes"),
          Unlocked());
  m.def(
      "peak_units",
      [](const std::string& isa) {
        std::vector<std::pair<std::string, std::string>> units;
        for (const PeakKernel& kernel : peak_kernels(resolve_isa(isa))) {
          units.emplace_back(kernel.name, row_type_name(kernel.row_type));
        }
        return units;
      },
      py::arg("isa"));
  m.def(
      "measure_peak",
      [](const std::string& name, const std::vector<int>& cpus, double seconds) {
        return measure_peak(peak_kernel(name), cpus, seconds);
      },
      py::arg("unit"), py::kw_only(), py::arg("cpus"), py::arg("seconds"), Unlocked());
}

}  // namespace moebius
