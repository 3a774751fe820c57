// moebius._kernels_testing: what tests and benchmarks need beyond the product. Its functions take objects of
// moebius._kernels; both modules are linked with the same library, each with a copy of its own, which shares nothing but
// objects: the library has no state that is written after its first use.
#include <pybind11/pybind11.h>

#include "kernels/testing/bindings.h"

PYBIND11_MODULE(_kernels_testing, m) {
  m.doc() = "Single GEMMs, limits of this machine, stress and random weights, for tests and `moebius bench`.";
  pybind11::module_::import("moebius._kernels");  // has the types of arguments, and base classes
  moebius::bind_gemm(m);
  moebius::bind_engine_testing(m);
  moebius::bind_mailbox_testing(m);
  moebius::bind_probe(m);
}
