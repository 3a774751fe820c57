// Names and byte offsets of every field of the mailbox's layout, for the test of the Python mirror.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "kernels/mailbox/layout.h"

namespace moebius {

// "Struct.field" -> offset in bytes; "Struct" -> its size.
inline std::map<std::string, size_t> mailbox_offsets() {
  using namespace mailbox;
#define MOEBIUS_FIELD(type, field) {#type "." #field, offsetof(type, field)}
  return {
      {"Header", sizeof(Header)},
      MOEBIUS_FIELD(Header, magic),
      MOEBIUS_FIELD(Header, abi_version),
      MOEBIUS_FIELD(Header, header_bytes),
      MOEBIUS_FIELD(Header, total_bytes),
      MOEBIUS_FIELD(Header, geometry),
      MOEBIUS_FIELD(Header, creation_id),
      MOEBIUS_FIELD(Header, flags_offset),
      MOEBIUS_FIELD(Header, requests_offset),
      MOEBIUS_FIELD(Header, responses_offset),
      MOEBIUS_FIELD(Header, request_stride),
      MOEBIUS_FIELD(Header, response_stride),
      MOEBIUS_FIELD(Header, shutdown),
      MOEBIUS_FIELD(Header, next_epoch),
      MOEBIUS_FIELD(Header, doorbell),
      MOEBIUS_FIELD(Header, error_word),
      MOEBIUS_FIELD(Header, servers),
      MOEBIUS_FIELD(Header, clients),
      MOEBIUS_FIELD(Header, identity),
      MOEBIUS_FIELD(Header, refusals),
      MOEBIUS_FIELD(Header, rejections),
      {"Identity", sizeof(Identity)},
      MOEBIUS_FIELD(Identity, is_set),
      MOEBIUS_FIELD(Identity, text),
      {"Refusal", sizeof(Refusal)},
      MOEBIUS_FIELD(Refusal, generation),
      MOEBIUS_FIELD(Refusal, text),
      {"ClientRecord", sizeof(ClientRecord)},
      MOEBIUS_FIELD(ClientRecord, failure),
      MOEBIUS_FIELD(ClientRecord, failed_server),
      MOEBIUS_FIELD(ClientRecord, failed_layer),
      MOEBIUS_FIELD(ClientRecord, failed_slot),
      MOEBIUS_FIELD(ClientRecord, failed_epoch),
      MOEBIUS_FIELD(ClientRecord, driver),
      MOEBIUS_FIELD(ClientRecord, pid),
      MOEBIUS_FIELD(ClientRecord, abandon),
      {"Geometry", sizeof(Geometry)},
      MOEBIUS_FIELD(Geometry, num_layers),
      MOEBIUS_FIELD(Geometry, hidden_size),
      MOEBIUS_FIELD(Geometry, top_k),
      MOEBIUS_FIELD(Geometry, num_slots),
      MOEBIUS_FIELD(Geometry, max_rows),
      MOEBIUS_FIELD(Geometry, num_servers),
      MOEBIUS_FIELD(Geometry, dtype),
      MOEBIUS_FIELD(Geometry, num_clients),
      {"ServerRecord", sizeof(ServerRecord)},
      MOEBIUS_FIELD(ServerRecord, generation),
      MOEBIUS_FIELD(ServerRecord, pid),
      MOEBIUS_FIELD(ServerRecord, phase),
      MOEBIUS_FIELD(ServerRecord, heartbeat_ns),
      MOEBIUS_FIELD(ServerRecord, calls),
      MOEBIUS_FIELD(ServerRecord, rows),
      MOEBIUS_FIELD(ServerRecord, error_layer),
      MOEBIUS_FIELD(ServerRecord, error_code),
      MOEBIUS_FIELD(ServerRecord, error_epoch),
      MOEBIUS_FIELD(ServerRecord, busy_ns),
      MOEBIUS_FIELD(ServerRecord, sleeping),
      MOEBIUS_FIELD(ServerRecord, progress),
      MOEBIUS_FIELD(ServerRecord, busy_since_ns),
      MOEBIUS_FIELD(ServerRecord, weights_digest),
      {"ReadyLine", sizeof(ReadyLine)},
      MOEBIUS_FIELD(ReadyLine, epoch),
      {"DoneLine", sizeof(DoneLine)},
      MOEBIUS_FIELD(DoneLine, epoch),
      MOEBIUS_FIELD(DoneLine, outcome),
      MOEBIUS_FIELD(DoneLine, clients_waiting),
      MOEBIUS_FIELD(DoneLine, answered),
      {"RequestHeader", sizeof(RequestHeader)},
      MOEBIUS_FIELD(RequestHeader, epoch),
      MOEBIUS_FIELD(RequestHeader, layer),
      MOEBIUS_FIELD(RequestHeader, rows),
      MOEBIUS_FIELD(RequestHeader, trace_id),
      MOEBIUS_FIELD(RequestHeader, span_id),
      MOEBIUS_FIELD(RequestHeader, trace_flags),
      {"ResponseHeader", sizeof(ResponseHeader)},
      MOEBIUS_FIELD(ResponseHeader, epoch),
      MOEBIUS_FIELD(ResponseHeader, compute_ns),
      MOEBIUS_FIELD(ResponseHeader, generation),
      MOEBIUS_FIELD(ResponseHeader, status),
      MOEBIUS_FIELD(ResponseHeader, layer),
      MOEBIUS_FIELD(ResponseHeader, rows),
      MOEBIUS_FIELD(ResponseHeader, error_text),
  };
#undef MOEBIUS_FIELD
}

}  // namespace moebius
