#include <pybind11/stl.h>

#include "kernels/bindings/released_gil.h"
#include "kernels/pool/limits.h"
#include "kernels/testing/bindings.h"
#include "kernels/testing/pool_stress.h"
#include "kernels/testing/random_weights.h"

namespace py = pybind11;

namespace moebius {
namespace {

py::tuple pool_stress(uint32_t threads, uint64_t runs, int64_t spin_microseconds, uint64_t throw_every,
                      uint64_t pause_every) {
  if (threads == 0) throw std::invalid_argument("threads is 0; it must be at least 1");
  pool::StressResult result;
  {
    const ReleasedGil release;
    result = pool::stress({threads, runs, std::chrono::microseconds(spin_microseconds), throw_every, pause_every});
  }
  return py::make_tuple(result.tasks, result.exceptions, result.seconds);
}

void fill_layer(ExpertEngine& engine, uint32_t layer, uint64_t seed) {
  const ReleasedGil release;
  fill_random(engine, layer, seed);
}

}  // namespace

void bind_engine_testing(py::module_& m) {
  m.def("fill_random", &fill_layer, py::arg("engine"), py::arg("layer"), py::arg("seed"));
  m.def("pool_stress", &pool_stress, py::kw_only(), py::arg("threads"), py::arg("runs"), py::arg("spin_microseconds"),
        py::arg("throw_every"), py::arg("pause_every"));
  m.def("pool_default_threads", &pool::default_threads, py::arg("cpus"));
  m.def("pool_default_spin_microseconds",
        [](uint32_t threads) { return pool::default_spin(threads).count() / 1000; }, py::arg("threads"));
}

}  // namespace moebius
