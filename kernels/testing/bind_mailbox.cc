// Mailboxes under stress, and parts of them that tests and benchmarks measure or compare with.
#include <pybind11/stl.h>

#include "kernels/bindings/mailbox_errors.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/mailbox/wait_policy.h"
#include "kernels/testing/bindings.h"
#include "kernels/testing/echo_backend.h"
#include "kernels/testing/mailbox_stress.h"

namespace py = pybind11;

namespace moebius {
namespace {

using namespace mailbox;
using Unlocked = py::call_guard<ReleasedGil>;

void bind_echo(py::module_& m) {
  py::class_<EchoBackend, ExpertBackend, std::shared_ptr<EchoBackend>>(m, "EchoBackend")
      .def(py::init([](uint32_t hidden_size, float scale, uint64_t delay_us, int64_t fail_layer) {
             return std::make_shared<EchoBackend>(EchoOptions{hidden_size, scale, delay_us, fail_layer});
           }),
           py::arg("hidden_size"), py::kw_only(), py::arg("scale") = 1.0f, py::arg("delay_us") = 0,
           py::arg("fail_layer") = -1);
}

void bind_host_call(py::module_& m) {
  py::class_<HostCall>(m, "MailboxHostCall")
      .def(py::init([](Mailbox& box, uint32_t slot, uint32_t layer, uintptr_t hidden_states, uintptr_t topk_ids,
                       uintptr_t topk_weights, uint32_t rows, uintptr_t output, uint64_t deadline_ms) {
             return std::make_unique<HostCall>(HostCall{&box, slot, layer, pointer<void>(hidden_states),
                                                        pointer<int32_t>(topk_ids), pointer<float>(topk_weights),
                                                        rows, pointer<float>(output), deadline_ms});
           }),
           py::arg("mailbox"), py::arg("slot"), py::arg("layer"), py::arg("hidden_states"), py::arg("topk_ids"),
           py::arg("topk_weights"), py::arg("rows"), py::arg("output"), py::arg("deadline_ms"),
           py::keep_alive<1, 2>())
      .def_property_readonly("address", [](const HostCall& call) { return reinterpret_cast<uintptr_t>(&call); })
      .def_readonly("failures", &HostCall::failures)
      .def_property_readonly_static(
          "submit_function", [](const py::object&) { return reinterpret_cast<uintptr_t>(&submit_on_host); })
      .def_property_readonly_static(
          "collect_function", [](const py::object&) { return reinterpret_cast<uintptr_t>(&collect_on_host); });
}

void bind_stress(py::module_& m) {
  m.def(
      "mailbox_stress",
      [](Mailbox& box, uint64_t rounds, uint64_t seed, float scale_sum, uint64_t deadline_ms, double recovery_s) {
        const StressResult r = stress(box, {rounds, seed, scale_sum, deadline_ms, recovery_s});
        return std::map<std::string, uint64_t>{{"answered", r.answered},
                                               {"wrong", r.wrong},
                                               {"lost", r.lost},
                                               {"resubmitted", r.resubmitted},
                                               {"stale", r.stale}};
      },
      py::arg("mailbox"), py::kw_only(), py::arg("rounds"), py::arg("seed"), py::arg("scale_sum"),
      py::arg("deadline_ms"), py::arg("recovery_s"), Unlocked());
  m.def("mailbox_round_trips", &measure_round_trips, py::arg("mailbox"), py::kw_only(), py::arg("rows"),
        py::arg("rounds"), py::arg("warmup"), py::arg("deadline_ms"), Unlocked());
  m.def(
      "ping_pong",
      [](uintptr_t address, bool asks, uint32_t rounds, uint64_t spin_ns) {
        return ping_pong(pointer<uint32_t>(address), asks, rounds, spin_ns);
      },
      py::arg("address"), py::kw_only(), py::arg("asks"), py::arg("rounds"), py::arg("spin_ns"), Unlocked());
  m.def(
      "mailbox_spin_ns",
      [](uint32_t participants, uint32_t cores) {
        const SpinBudget budget = spin_budget(participants, cores);
        return py::make_tuple(budget.client_ns, budget.server_ns);
      },
      py::arg("participants"), py::arg("cores") = 0);
}

}  // namespace

void bind_mailbox_testing(py::module_& m) {
  register_mailbox_errors();
  bind_echo(m);
  bind_host_call(m);
  bind_stress(m);
}

}  // namespace moebius
