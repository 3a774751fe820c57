#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/mailbox_errors.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/mailbox/mailbox.h"
#include "kernels/mailbox/segment.h"
#include "kernels/mailbox/server.h"

namespace py = pybind11;

namespace moebius {
namespace {

using namespace mailbox;
using Unlocked = py::call_guard<ReleasedGil>;

uint64_t submit(Mailbox& box, uint32_t slot, uint32_t layer, uintptr_t hidden_states, uintptr_t topk_ids,
                uintptr_t topk_weights, uint32_t rows) {
  return box.submit(slot, layer, pointer<void>(hidden_states), pointer<int32_t>(topk_ids),
                    pointer<float>(topk_weights), rows);
}

std::vector<uint64_t> collect(Mailbox& box, uint32_t slot, uint64_t epoch, uintptr_t output, uint64_t deadline_ms) {
  return box.collect(slot, epoch, pointer<float>(output), deadline_ms);
}

template <size_t N>
void copy_bytes(const py::bytes& bytes, std::array<uint8_t, N>& target, const char* name) {
  const std::string_view view = bytes;
  if (view.size() != N) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(view.size()) + " bytes, it needs " +
                                std::to_string(N));
  }
  std::copy(view.begin(), view.end(), target.begin());
}

void set_trace(Mailbox& box, uint32_t slot, const py::bytes& trace_id, const py::bytes& span_id, uint32_t flags) {
  TraceContext trace;
  copy_bytes(trace_id, trace.trace_id, "trace_id");
  copy_bytes(span_id, trace.span_id, "span_id");
  trace.flags = flags;
  box.set_trace(slot, trace);
}

py::list take_traced_calls(MailboxServer& server) {
  py::list calls;
  for (const TracedCall& call : server.take_traced_calls()) {
    calls.append(py::make_tuple(
        py::bytes(reinterpret_cast<const char*>(call.trace.trace_id.data()), call.trace.trace_id.size()),
        py::bytes(reinterpret_cast<const char*>(call.trace.span_id.data()), call.trace.span_id.size()),
        call.trace.flags, call.layer, call.rows, call.start_unix_ns, call.duration_ns));
  }
  return calls;
}

void bind_geometry(py::module_& m) {
  py::class_<Geometry>(m, "MailboxGeometry")
      .def(py::init([](uint32_t num_layers, uint32_t hidden_size, uint32_t top_k, uint32_t num_slots,
                       uint32_t max_rows, uint32_t num_servers, uint32_t dtype, uint32_t num_clients) {
             const Geometry g{num_layers, hidden_size, top_k, num_slots, max_rows, num_servers, dtype, num_clients};
             check_geometry(g);
             return g;
           }),
           py::kw_only(), py::arg("num_layers"), py::arg("hidden_size"), py::arg("top_k"), py::arg("num_slots"),
           py::arg("max_rows"), py::arg("num_servers"), py::arg("dtype"), py::arg("num_clients") = 1)
      .def_readonly("num_layers", &Geometry::num_layers)
      .def_readonly("hidden_size", &Geometry::hidden_size)
      .def_readonly("top_k", &Geometry::top_k)
      .def_readonly("num_slots", &Geometry::num_slots)
      .def_readonly("max_rows", &Geometry::max_rows)
      .def_readonly("num_servers", &Geometry::num_servers)
      .def_readonly("dtype", &Geometry::dtype)
      .def_readonly("num_clients", &Geometry::num_clients);
}

// Functions for clients that share the mailbox or that a device drives, beyond submit and collect.
void bind_sharing(py::class_<Mailbox>& box) {
  box.def_property_readonly("address",
                            [](const Mailbox& b) { return reinterpret_cast<uintptr_t>(b.segment().base()); })
      .def(
          "claim", [](Mailbox& b, bool device) { b.claim(device ? Driver::kDevice : Driver::kHost); },
          py::arg("device"))
      .def("release", &Mailbox::release)
      .def("highest_epoch", &Mailbox::highest_epoch)
      .def("set_epoch", &Mailbox::set_epoch, py::arg("last"))
      .def("abandon_requests", &Mailbox::abandon_requests, py::arg("first_slot"), py::arg("num_slots"))
      .def("wake_servers", &Mailbox::wake_servers)
      .def(
          "report_failure",
          [](const Mailbox& b, uint32_t failure, uint32_t server, uint32_t layer, uint32_t slot, uint64_t epoch) {
            b.report_failure({ClientFailure(failure), server, layer, slot, epoch});
          },
          py::arg("failure"), py::arg("server"), py::arg("layer"), py::arg("slot"), py::arg("epoch"))
      .def("clear_failure", &Mailbox::clear_failure)
      .def(
          "client_report",
          [](const Mailbox& b, uint32_t client) {
            const ClientReport r = b.client_report(client);
            return py::make_tuple(uint32_t(r.failure), r.server, r.layer, r.slot, r.epoch);
          },
          py::arg("client"))
      .def("set_abandon", &Mailbox::set_abandon, py::arg("server_plus_one"))
      .def("release_waits", &Mailbox::release_waits, py::arg("first_slot"), py::arg("num_slots"))
      .def("error_text", &Mailbox::error_text, py::arg("slot"), py::arg("server"), py::arg("epoch"))
      .def("open_epoch", &Mailbox::open_epoch, py::arg("slot"))
      .def(
          "overdue",
          [](const Mailbox& b, uint32_t slot, uint64_t since_ns, uint64_t deadline_ns) -> py::object {
            const std::optional<Overdue> found = b.overdue(slot, since_ns, deadline_ns);
            return found ? py::object(py::make_tuple(found->server, found->reason)) : py::none();
          },
          py::arg("slot"), py::arg("since_ns"), py::arg("deadline_ns"));
}

void bind_client(py::module_& m) {
  py::class_<ServerState>(m, "MailboxServerState")
      .def_readonly("pid", &ServerState::pid)
      .def_readonly("state", &ServerState::state)
      .def_readonly("generation", &ServerState::generation)
      .def_readonly("heartbeat_age_s", &ServerState::heartbeat_age_s)
      .def_readonly("calls", &ServerState::calls)
      .def_readonly("rows", &ServerState::rows)
      .def_readonly("busy_s", &ServerState::busy_s)
      .def_readonly("progress", &ServerState::progress)
      .def_readonly("damages", &ServerState::damages)
      .def_readonly("request_s", &ServerState::request_s)
      .def_readonly("refusal", &ServerState::refusal);
  py::class_<Mailbox> box(m, "Mailbox");
  bind_sharing(box);
  box.def_static(
          "create",
          [](const std::string& name, const Geometry& geometry, int64_t spin_ns, const Interleave& interleave) {
            return std::make_unique<Mailbox>(Segment::create(name, geometry, interleave), spin_ns);
          },
          py::arg("name"), py::arg("geometry"), py::arg("spin_ns"), py::arg("interleave") = Interleave{}, Unlocked())
      .def_static(
          "attach",
          [](const std::string& name, double timeout_s, const std::optional<Geometry>& expected, int64_t spin_ns,
             uint32_t client, uint32_t group) {
            return std::make_unique<Mailbox>(Segment::attach(name, timeout_s, expected), spin_ns,
                                             ClientId{client, group});
          },
          py::arg("name"), py::arg("timeout_s"), py::arg("expected"), py::arg("spin_ns"), py::arg("client") = 0,
          py::arg("group") = 0, Unlocked())
      .def_property_readonly("geometry", [](const Mailbox& box) { return box.segment().geometry(); })
      .def_property_readonly("nbytes", [](const Mailbox& box) { return box.segment().regions().total; })
      .def("submit", &submit, py::arg("slot"), py::arg("layer"), py::arg("hidden_states"), py::arg("topk_ids"),
           py::arg("topk_weights"), py::arg("rows"), Unlocked())
      .def("collect", &collect, py::arg("slot"), py::arg("epoch"), py::arg("output"), py::arg("deadline_ms"),
           Unlocked())
      .def("set_trace", &set_trace, py::arg("slot"), py::arg("trace_id"), py::arg("span_id"), py::arg("flags"))
      .def("server_state", &Mailbox::server_state, py::arg("server_index"))
      .def("damages", &Mailbox::damages)
      .def("wait_servers_ready", &Mailbox::wait_servers_ready, py::arg("timeout_s"), Unlocked())
      .def("accept_generations", &Mailbox::accept_generations, py::arg("generations"))
      .def("reject", &Mailbox::reject, py::arg("server_index"), py::arg("generation"), py::arg("reason"), Unlocked())
      .def_property_readonly("identity", [](const Mailbox& b) { return b.segment().identity(); })
      .def("shut_down", &Mailbox::shut_down)
      .def_property_readonly("is_shut_down", &Mailbox::is_shut_down);
  m.def("mailbox_unlink", &Segment::unlink, py::arg("name"));
  m.def(
      "mailbox_health",
      [](const std::string& name) {
        const Mailbox box(Segment::observe(name), 0);
        std::vector<ServerState> states;
        for (uint32_t s = 0; s < box.segment().geometry().num_servers; ++s) states.push_back(box.server_state(s));
        return states;
      },
      py::arg("name"), Unlocked());
  m.def("mailbox_identity_difference", &identity_difference, py::arg("expected"), py::arg("found"));
  m.def("mailbox_is_stale", &Segment::is_stale, py::arg("name"));
}

void bind_server(py::module_& m) {
  py::class_<MailboxServer>(m, "MailboxServer")
      .def(py::init([](const std::string& name, uint32_t server_index, const std::shared_ptr<ExpertBackend>& backend,
                       double attach_timeout_s, double heartbeat_s, int64_t spin_ns, uint32_t num_threads,
                       const std::string& identity) {
             const ReleasedGil release;
             const ServerOptions options{attach_timeout_s, heartbeat_s, spin_ns, num_threads, identity};
             return std::make_unique<MailboxServer>(name, server_index, *backend, options);
           }),
           py::arg("mailbox_name"), py::arg("server_index"), py::arg("backend"), py::kw_only(),
           py::arg("attach_timeout_s"), py::arg("heartbeat_s"), py::arg("spin_ns"), py::arg("num_threads"),
           py::arg("identity") = "", py::keep_alive<1, 4>())
      .def("start", &MailboxServer::start, py::arg("weights_digest") = 0, Unlocked())
      .def("beat", &MailboxServer::beat)
      .def("note_damage", &MailboxServer::note_damage)
      .def("note_problem", &MailboxServer::note_problem, py::arg("reason"), Unlocked())
      .def_property_readonly("rejection", &MailboxServer::rejection)
      .def("drain", &MailboxServer::drain, py::arg("timeout_s"), Unlocked())
      .def("stop", &MailboxServer::stop, Unlocked())
      .def_property_readonly("is_running", &MailboxServer::is_running)
      .def_property_readonly("generation", &MailboxServer::generation)
      .def("take_traced_calls", &take_traced_calls);
}

}  // namespace

void bind_mailbox(py::module_& m) {
  register_mailbox_errors();
  bind_geometry(m);
  bind_client(m);
  bind_server(m);
}

}  // namespace moebius
