#include <pybind11/stl.h>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/topology/memory.h"
#include "kernels/topology/topology.h"

namespace py = pybind11;

namespace moebius {

using namespace topology;

void bind_topology(py::module_& m) {
  py::class_<NumaNode>(m, "NumaNode")
      .def_readonly("id", &NumaNode::id)
      .def_readonly("cpus", &NumaNode::cpus)
      .def_readonly("memory_total_bytes", &NumaNode::memory_total_bytes)
      .def_readonly("memory_free_bytes", &NumaNode::memory_free_bytes)
      .def_readonly("memory_allowed", &NumaNode::memory_allowed);
  py::class_<Topology>(m, "Topology")
      .def_static("detect", &Topology::detect, py::arg("sysfs_root"), py::arg("proc_root"), py::arg("cgroup_root"))
      .def_readonly("nodes", &Topology::nodes)
      .def_readonly("allowed_cpus", &Topology::allowed_cpus)
      .def_readonly("cpu_quota", &Topology::cpu_quota)
      .def_readonly("core_leaders", &Topology::core_leaders)
      .def("usable_cpus", &Topology::usable_cpus, py::arg("node"))
      .def("recommended_threads", &Topology::recommended_threads, py::arg("node"))
      .def("server_nodes", &Topology::server_nodes);
  py::class_<BindResult>(m, "BindResult")
      .def_readonly("applied", &BindResult::applied)
      .def_readonly("message", &BindResult::message);
  m.def("parse_cpu_list", &parse_cpu_list, py::arg("text"), py::arg("source"));
  m.def("pin_thread", &pin_thread, py::arg("cpus"));
  m.def("bind_memory", &bind_memory, py::arg("node"));
  m.def(
      "bind_range",
      [](uintptr_t address, size_t bytes, int node) {
        const ReleasedGil release;
        return bind_range(reinterpret_cast<void*>(address), bytes, node);
      },
      py::arg("address"), py::arg("nbytes"), py::arg("node"));
  m.def(
      "page_nodes",
      [](uintptr_t address, size_t bytes) { return page_nodes(reinterpret_cast<const void*>(address), bytes); },
      py::arg("address"), py::arg("nbytes"));
}

}  // namespace moebius
