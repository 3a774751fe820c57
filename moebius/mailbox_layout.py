"""Python mirror of `kernels/mailbox/layout.h`, where every field's owner and ordering is documented.

For tools that read a mailbox without the C++ module, and for the test that both descriptions agree.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

ABI_VERSION = 3
MAGIC = 0x31584F425345424D  # "MBESBOX1", little-endian
MAX_SERVERS = 16
MAX_CLIENTS = 8
MAX_RECORDS = 16
_LINE, _PAGE = 64, 4096


class SizedGeometry(Protocol):
    """What the segment's size follows from; `moebius.mailbox.MailboxGeometry` is the real one."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def max_rows(self) -> int: ...

    @property
    def num_servers(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def num_clients(self) -> int: ...


class Geometry(ctypes.LittleEndianStructure):
    """Sizes fixed at creation."""

    _fields_ = [
        ("num_layers", ctypes.c_uint32),
        ("hidden_size", ctypes.c_uint32),
        ("top_k", ctypes.c_uint32),
        ("num_slots", ctypes.c_uint32),
        ("max_rows", ctypes.c_uint32),
        ("num_servers", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("num_clients", ctypes.c_uint32),
    ]


class ServerRecord(ctypes.LittleEndianStructure):
    """One server's own words."""

    _fields_ = [
        ("generation", ctypes.c_uint64),
        ("pid", ctypes.c_int32),
        ("phase", ctypes.c_uint32),
        ("heartbeat_ns", ctypes.c_uint64),
        ("calls", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("error_layer", ctypes.c_uint32),
        ("error_code", ctypes.c_uint32),
        ("error_epoch", ctypes.c_uint64),
        ("busy_ns", ctypes.c_uint64),
        ("sleeping", ctypes.c_uint32),
        ("reserved1", ctypes.c_uint32 * 15),
        ("progress", ctypes.c_uint64),
        ("busy_since_ns", ctypes.c_uint64),
        ("weights_digest", ctypes.c_uint64),
        ("reserved2", ctypes.c_uint64 * 5),
    ]


class Identity(ctypes.LittleEndianStructure):
    """What everybody who computes with the mailbox must agree on."""

    _fields_ = [
        ("is_set", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("text", ctypes.c_char * 1016),
    ]


class Refusal(ctypes.LittleEndianStructure):
    """Why a server was not let in."""

    _fields_ = [("generation", ctypes.c_uint64), ("text", ctypes.c_char * 248)]


class ClientRecord(ctypes.LittleEndianStructure):
    """What one client tells its peers, and its host its device."""

    _fields_ = [
        ("failure", ctypes.c_uint32),
        ("failed_server", ctypes.c_uint32),
        ("failed_layer", ctypes.c_uint32),
        ("failed_slot", ctypes.c_uint32),
        ("failed_epoch", ctypes.c_uint64),
        ("driver", ctypes.c_uint32),
        ("pid", ctypes.c_int32),
        ("abandon", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 7),
    ]


class Header(ctypes.LittleEndianStructure):
    """The segment's first pages."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("abi_version", ctypes.c_uint32),
        ("header_bytes", ctypes.c_uint32),
        ("total_bytes", ctypes.c_uint64),
        ("geometry", Geometry),
        ("creation_id", ctypes.c_uint64),
        ("flags_offset", ctypes.c_uint64),
        ("requests_offset", ctypes.c_uint64),
        ("responses_offset", ctypes.c_uint64),
        ("request_stride", ctypes.c_uint64),
        ("response_stride", ctypes.c_uint64),
        ("reserved0", ctypes.c_uint64 * 3),
        ("shutdown", ctypes.c_uint32),
        ("reserved1", ctypes.c_uint32 * 15),
        ("next_epoch", ctypes.c_uint64),
        ("reserved2", ctypes.c_uint64 * 7),
        ("doorbell", ctypes.c_uint32),
        ("reserved3", ctypes.c_uint32 * 15),
        ("error_word", ctypes.c_uint32),
        ("reserved4", ctypes.c_uint32 * 15),
        ("reserved5", ctypes.c_uint64 * 16),
        ("servers", ServerRecord * MAX_SERVERS),
        ("clients", ClientRecord * MAX_RECORDS),
        ("identity", Identity),
        ("refusals", Refusal * MAX_SERVERS),
        ("rejections", Refusal * MAX_SERVERS),
        ("reserved6", ctypes.c_uint8 * 2560),
    ]


class ReadyLine(ctypes.LittleEndianStructure):
    """One per slot and client."""

    _fields_ = [("epoch", ctypes.c_uint64), ("reserved", ctypes.c_uint64 * 7)]


class DoneLine(ctypes.LittleEndianStructure):
    """One per slot and server."""

    _fields_ = [
        ("epoch", ctypes.c_uint64),
        ("outcome", ctypes.c_uint64),
        ("clients_waiting", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint32),
        ("answered", ctypes.c_uint32 * MAX_CLIENTS),
        ("reserved1", ctypes.c_uint64),
    ]


class RequestHeader(ctypes.LittleEndianStructure):
    """In front of a slot's payload."""

    _fields_ = [
        ("epoch", ctypes.c_uint64),
        ("layer", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("trace_id", ctypes.c_uint8 * 16),
        ("span_id", ctypes.c_uint8 * 8),
        ("trace_flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 5),
    ]


class ResponseHeader(ctypes.LittleEndianStructure):
    """In front of a (slot, server)'s output."""

    _fields_ = [
        ("epoch", ctypes.c_uint64),
        ("compute_ns", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("status", ctypes.c_uint32),
        ("layer", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 7),
        ("error_text", ctypes.c_char * 192),
    ]


STRUCTURES: tuple[type[ctypes.LittleEndianStructure], ...] = (
    Header,
    Geometry,
    ServerRecord,
    ClientRecord,
    Identity,
    Refusal,
    ReadyLine,
    DoneLine,
    RequestHeader,
    ResponseHeader,
)


def offsets() -> dict[str, int]:
    """ "Struct.field" to its offset in bytes, "Struct" to its size; reserved fields left out."""
    found: dict[str, int] = {}
    for structure in STRUCTURES:
        found[structure.__name__] = ctypes.sizeof(structure)
        for name, *_ in structure._fields_:
            if not name.startswith("reserved"):
                found[f"{structure.__name__}.{name}"] = getattr(structure, name).offset
    return found


def row_begin(rows: int, client: int, num_clients: int) -> int:
    """First row of a client's part of a request; that of `num_clients` is the end of the last part."""
    return rows * client // num_clients


def segment_bytes(geometry: SizedGeometry) -> int:
    """Size of the segment of a `moebius.mailbox.MailboxGeometry`, as `regions_of` in layout.h computes it."""
    element = 2 if geometry.dtype == "bfloat16" else 4
    rows, slots, servers = geometry.max_rows, geometry.num_slots, geometry.num_servers
    choices = rows * geometry.top_k * 4
    ids = ctypes.sizeof(RequestHeader) + _align(rows * geometry.hidden_size * element, _LINE)
    request = _align(ids + _align(choices, _LINE) + choices, _PAGE)
    response = _align(ctypes.sizeof(ResponseHeader) + rows * geometry.hidden_size * 4, _PAGE)
    flags = ctypes.sizeof(Header) + _LINE * slots * (geometry.num_clients + servers)
    return _align(flags, _PAGE) + slots * (request + servers * response)


def _align(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
