// The parts of the Python module; each adds its classes and functions to `moebius._kernels`.
#pragma once

#include <pybind11/pybind11.h>

namespace moebius {

void bind_moe(pybind11::module_& m);             // kernels/bindings/bind_moe.cc
void bind_dense(pybind11::module_& m);           // kernels/bindings/bind_dense.cc
void bind_decoder(pybind11::module_& m);         // kernels/bindings/bind_decoder.cc
void bind_format(pybind11::module_& m);          // kernels/bindings/bind_format.cc
void bind_files(pybind11::module_& m);           // kernels/bindings/bind_files.cc
void bind_placement(pybind11::module_& m);       // kernels/bindings/bind_placement.cc
void bind_topology(pybind11::module_& m);        // kernels/bindings/bind_topology.cc
void bind_mailbox(pybind11::module_& m);         // kernels/bindings/bind_mailbox.cc
void bind_mailbox_layout(pybind11::module_& m);  // kernels/bindings/bind_mailbox_layout.cc

}  // namespace moebius
