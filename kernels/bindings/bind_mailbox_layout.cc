// Layouts of shared memory for Python: constants, and name, offset and size of every field of every structure, of the
// mailbox and of the segments of packed experts.
#include <fcntl.h>
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/mailbox/layout.h"
#include "kernels/moe/weight_segment.h"

namespace py = pybind11;

namespace moebius {
namespace {

using namespace mailbox;

struct Field {
  const char* name;
  size_t offset;
  size_t bytes;
};

py::tuple structure(size_t bytes, std::initializer_list<Field> fields) {
  py::dict found;
  for (const Field& field : fields) found[field.name] = py::make_tuple(field.offset, field.bytes);
  return py::make_tuple(bytes, found);
}

// (bytes, {field: (offset, bytes)}) of every structure, reserved fields too: a test sees that none is missing.
py::dict mailbox_layout() {
  py::dict found;
#define FIELD(type, field) Field{#field, offsetof(type, field), sizeof(type::field)}
  found["Header"] = structure(
      sizeof(Header),
      {FIELD(Header, magic), FIELD(Header, abi_version), FIELD(Header, header_bytes), FIELD(Header, total_bytes),
       FIELD(Header, geometry), FIELD(Header, creation_id), FIELD(Header, flags_offset), FIELD(Header, requests_offset),
       FIELD(Header, responses_offset), FIELD(Header, request_stride), FIELD(Header, response_stride),
       FIELD(Header, reserved0), FIELD(Header, shutdown), FIELD(Header, reserved1), FIELD(Header, next_epoch),
       FIELD(Header, reserved2), FIELD(Header, doorbell), FIELD(Header, reserved3), FIELD(Header, error_word),
       FIELD(Header, reserved4), FIELD(Header, reserved5), FIELD(Header, servers), FIELD(Header, clients),
       FIELD(Header, identity), FIELD(Header, refusals), FIELD(Header, rejections), FIELD(Header, reserved6)});
  found["Geometry"] = structure(
      sizeof(Geometry),
      {FIELD(Geometry, num_layers), FIELD(Geometry, hidden_size), FIELD(Geometry, top_k), FIELD(Geometry, num_slots),
       FIELD(Geometry, max_rows), FIELD(Geometry, num_servers), FIELD(Geometry, dtype), FIELD(Geometry, num_clients)});
  found["ServerRecord"] = structure(
      sizeof(ServerRecord),
      {FIELD(ServerRecord, generation), FIELD(ServerRecord, pid), FIELD(ServerRecord, phase),
       FIELD(ServerRecord, heartbeat_ns), FIELD(ServerRecord, calls), FIELD(ServerRecord, rows),
       FIELD(ServerRecord, error_layer), FIELD(ServerRecord, error_code), FIELD(ServerRecord, error_epoch),
       FIELD(ServerRecord, busy_ns), FIELD(ServerRecord, sleeping), FIELD(ServerRecord, reserved1),
       FIELD(ServerRecord, progress), FIELD(ServerRecord, busy_since_ns), FIELD(ServerRecord, weights_digest),
       FIELD(ServerRecord, damages), FIELD(ServerRecord, reserved2)});
  found["ClientRecord"] = structure(
      sizeof(ClientRecord),
      {FIELD(ClientRecord, failure), FIELD(ClientRecord, failed_server), FIELD(ClientRecord, failed_layer),
       FIELD(ClientRecord, failed_slot), FIELD(ClientRecord, failed_epoch), FIELD(ClientRecord, driver),
       FIELD(ClientRecord, pid), FIELD(ClientRecord, abandon), FIELD(ClientRecord, reserved)});
  found["Identity"] = structure(
      sizeof(Identity),
      {FIELD(Identity, is_set), FIELD(Identity, reserved), FIELD(Identity, text)});
  found["Refusal"] = structure(
      sizeof(Refusal),
      {FIELD(Refusal, generation), FIELD(Refusal, text)});
  found["ReadyLine"] = structure(
      sizeof(ReadyLine),
      {FIELD(ReadyLine, epoch), FIELD(ReadyLine, reserved)});
  found["DoneLine"] = structure(
      sizeof(DoneLine),
      {FIELD(DoneLine, epoch), FIELD(DoneLine, outcome), FIELD(DoneLine, clients_waiting), FIELD(DoneLine, reserved0),
       FIELD(DoneLine, answered), FIELD(DoneLine, reserved1)});
  found["RequestHeader"] = structure(
      sizeof(RequestHeader),
      {FIELD(RequestHeader, epoch), FIELD(RequestHeader, layer), FIELD(RequestHeader, rows),
       FIELD(RequestHeader, trace_id), FIELD(RequestHeader, span_id), FIELD(RequestHeader, trace_flags),
       FIELD(RequestHeader, reserved)});
  found["ResponseHeader"] = structure(
      sizeof(ResponseHeader),
      {FIELD(ResponseHeader, epoch), FIELD(ResponseHeader, compute_ns), FIELD(ResponseHeader, generation),
       FIELD(ResponseHeader, status), FIELD(ResponseHeader, layer), FIELD(ResponseHeader, rows),
       FIELD(ResponseHeader, reserved), FIELD(ResponseHeader, error_text)});
#undef FIELD
  return found;
}

// `Regions` of layout.h, by name.
py::dict mailbox_regions(uint32_t hidden_size, uint32_t top_k, uint32_t num_slots, uint32_t max_rows,
                         uint32_t num_servers, uint32_t dtype, uint32_t num_clients) {
  Geometry geometry{};
  geometry.hidden_size = hidden_size;
  geometry.top_k = top_k;
  geometry.num_slots = num_slots;
  geometry.max_rows = max_rows;
  geometry.num_servers = num_servers;
  geometry.dtype = dtype;
  geometry.num_clients = num_clients;
  const Regions regions = regions_of(geometry);
  py::dict found;
  found["flags"] = regions.flags;
  found["requests"] = regions.requests;
  found["responses"] = regions.responses;
  found["total"] = regions.total;
  found["hidden_states"] = regions.hidden_states;
  found["topk_ids"] = regions.topk_ids;
  found["topk_weights"] = regions.topk_weights;
  found["output"] = regions.output;
  found["request_stride"] = regions.request_stride;
  found["response_stride"] = regions.response_stride;
  return found;
}

py::dict weight_segment_layout() {
  namespace w = weights;
  py::dict found;
#define FIELD(type, field) Field{#field, offsetof(w::type, field), sizeof(w::type::field)}
  found["Header"] = structure(
      sizeof(w::Header),
      {FIELD(Header, magic), FIELD(Header, abi_version), FIELD(Header, header_bytes), FIELD(Header, total_bytes),
       FIELD(Header, num_layers), FIELD(Header, num_experts), FIELD(Header, layers_offset),
       FIELD(Header, experts_offset), FIELD(Header, load_record_offset), FIELD(Header, data_offset),
       FIELD(Header, hidden_size), FIELD(Header, intermediate_begin), FIELD(Header, intermediate_end),
       FIELD(Header, numa_node), FIELD(Header, boot_id), FIELD(Header, reserved0), FIELD(Header, generation),
       FIELD(Header, complete), FIELD(Header, pid), FIELD(Header, load_record_bytes),
       FIELD(Header, load_record_digest), FIELD(Header, experts_digest), FIELD(Header, checked),
       FIELD(Header, reserved1), FIELD(Header, reserved2), FIELD(Header, identity)});
  found["LayerRecord"] = structure(
      sizeof(w::LayerRecord),
      {FIELD(LayerRecord, offset), FIELD(LayerRecord, expert_bytes), FIELD(LayerRecord, down_offset),
       FIELD(LayerRecord, layer), FIELD(LayerRecord, num_slots), FIELD(LayerRecord, first_expert),
       FIELD(LayerRecord, has_bias), FIELD(LayerRecord, gate_up_format), FIELD(LayerRecord, down_format),
       FIELD(LayerRecord, reserved)});
  found["ExpertRecord"] = structure(
      sizeof(w::ExpertRecord),
      {FIELD(ExpertRecord, expert), FIELD(ExpertRecord, state), FIELD(ExpertRecord, digest),
       FIELD(ExpertRecord, squared_error), FIELD(ExpertRecord, squared_reference)});
#undef FIELD
  return found;
}

// Of any contiguous buffer, which is read where it is: an expert takes megabytes.
uint64_t weight_digest(const py::buffer& data, uint64_t seed) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  uint64_t digest = 0;
  {
    const ReleasedGil release;
    digest = weights::digest_of(static_cast<const std::byte*>(view.buf), static_cast<size_t>(view.len), seed);
  }
  PyBuffer_Release(&view);
  return digest;
}

[[noreturn]] void raise_os_error(const std::string& path) {
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
  throw py::error_already_set();
}

// The first `bytes` of a file, shared, at an address that is a multiple of 2 MiB, so that pages of that size are mapped
// as such. Unmapped with the last view of the array.
py::array_t<uint8_t> map_shared(const std::string& path, size_t bytes) {
  struct Mapping {
    void* reserved;
    size_t bytes;
  };
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) raise_os_error(path);
  // The system maps reserved pages as a whole, for any requested length.
  const size_t reserved_bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  void* reserved = mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* mapped = MAP_FAILED;
  if (reserved != MAP_FAILED) {
    auto* aligned =
        reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(reserved) + kHugePage - 1) / kHugePage * kHugePage);
    mapped = mmap(aligned, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  }
  const int error = errno;
  close(fd);
  if (mapped == MAP_FAILED) {
    if (reserved != MAP_FAILED) munmap(reserved, reserved_bytes);
    errno = error;
    raise_os_error(path);
  }
  const py::capsule owner(new Mapping{reserved, reserved_bytes}, [](void* object) {
    auto* mapping = static_cast<Mapping*>(object);
    munmap(mapping->reserved, mapping->bytes);
    delete mapping;
  });
  return py::array_t<uint8_t>(static_cast<py::ssize_t>(bytes), static_cast<uint8_t*>(mapped), owner);
}

}  // namespace

void bind_mailbox_layout(py::module_& m) {
  m.attr("MAILBOX_ABI_VERSION") = kAbiVersion;
  m.attr("MAILBOX_MAGIC") = kMagic;
  m.attr("MAILBOX_MAX_SERVERS") = kMaxServers;
  m.def("mailbox_layout", &mailbox_layout);
  py::register_exception<weights::SegmentError>(m, "SegmentError", PyExc_RuntimeError);
  m.attr("WEIGHT_SEGMENT_MAGIC") = weights::kMagic;
  m.attr("WEIGHT_SEGMENT_ABI_VERSION") = weights::kAbiVersion;
  m.def("weight_segment_layout", &weight_segment_layout);
  m.def("map_shared", &map_shared, py::arg("path"), py::arg("nbytes"));
  m.def("weight_digest", &weight_digest, py::arg("data"), py::arg("seed"));
  m.def("mailbox_regions", &mailbox_regions, py::kw_only(), py::arg("hidden_size"), py::arg("top_k"),
        py::arg("num_slots"), py::arg("max_rows"), py::arg("num_servers"), py::arg("dtype"), py::arg("num_clients"));
  m.def("mailbox_row_begin", &row_begin, py::arg("rows"), py::arg("client"), py::arg("num_clients"));
  py::native_enum<ClientFailure>(m, "ClientFailure", "enum.IntEnum")
      .value("NONE", ClientFailure::kNone)
      .value("DEADLINE", ClientFailure::kDeadline)
      .value("STALE_EPOCH", ClientFailure::kStaleEpoch)
      .value("COMPUTE", ClientFailure::kComputeFailed)
      .value("RESTARTED", ClientFailure::kRestarted)
      .value("ABANDONED", ClientFailure::kAbandoned)
      .value("PEER", ClientFailure::kPeer)
      .value("SHUT_DOWN", ClientFailure::kShutDown)
      .finalize();
}

}  // namespace moebius
