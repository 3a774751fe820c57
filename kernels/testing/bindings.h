// The parts of moebius._kernels_testing.
#pragma once

#include <pybind11/pybind11.h>

namespace moebius {

void bind_gemm(pybind11::module_& m);             // kernels/testing/bind_gemm.cc
void bind_engine_testing(pybind11::module_& m);   // kernels/testing/bind_engine.cc
void bind_mailbox_testing(pybind11::module_& m);  // kernels/testing/bind_mailbox.cc
void bind_probe(pybind11::module_& m);            // kernels/testing/bind_probe.cc

}  // namespace moebius
