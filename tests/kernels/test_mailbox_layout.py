"""Guards the one layout: its numbers change only on purpose, and flags never share a cache line."""

from __future__ import annotations

import pytest

from moebius import _kernels
from moebius.mailbox import MAGIC, field_offsets
from tests.helpers.mailbox import geometry, header_word, new_mailbox

# The ABI, stated a second time: who changes it raises the version, and this table. Without reserved fields.
ABI_VERSION = 4
ABI: dict[str, tuple[int, dict[str, tuple[int, int]]]] = {
    "Header": (
        16384,
        {
            "magic": (0, 8),
            "abi_version": (8, 4),
            "header_bytes": (12, 4),
            "total_bytes": (16, 8),
            "geometry": (24, 32),
            "creation_id": (56, 8),
            "flags_offset": (64, 8),
            "requests_offset": (72, 8),
            "responses_offset": (80, 8),
            "request_stride": (88, 8),
            "response_stride": (96, 8),
            "shutdown": (128, 4),
            "next_epoch": (192, 8),
            "doorbell": (256, 4),
            "error_word": (320, 4),
            "servers": (512, 3072),
            "clients": (3584, 1024),
            "identity": (4608, 1024),
            "refusals": (5632, 4096),
            "rejections": (9728, 4096),
        },
    ),
    "Geometry": (
        32,
        {
            "num_layers": (0, 4),
            "hidden_size": (4, 4),
            "top_k": (8, 4),
            "num_slots": (12, 4),
            "max_rows": (16, 4),
            "num_servers": (20, 4),
            "dtype": (24, 4),
            "num_clients": (28, 4),
        },
    ),
    "ServerRecord": (
        192,
        {
            "generation": (0, 8),
            "pid": (8, 4),
            "phase": (12, 4),
            "heartbeat_ns": (16, 8),
            "calls": (24, 8),
            "rows": (32, 8),
            "error_layer": (40, 4),
            "error_code": (44, 4),
            "error_epoch": (48, 8),
            "busy_ns": (56, 8),
            "sleeping": (64, 4),
            "progress": (128, 8),
            "busy_since_ns": (136, 8),
            "weights_digest": (144, 8),
            "damages": (152, 8),
        },
    ),
    "ClientRecord": (
        64,
        {
            "failure": (0, 4),
            "failed_server": (4, 4),
            "failed_layer": (8, 4),
            "failed_slot": (12, 4),
            "failed_epoch": (16, 8),
            "driver": (24, 4),
            "pid": (28, 4),
            "abandon": (32, 4),
        },
    ),
    "Identity": (
        1024,
        {"is_set": (0, 4), "text": (8, 1016)},
    ),
    "Refusal": (
        256,
        {"generation": (0, 8), "text": (8, 248)},
    ),
    "ReadyLine": (
        64,
        {"epoch": (0, 8)},
    ),
    "DoneLine": (
        64,
        {"epoch": (0, 8), "outcome": (8, 8), "clients_waiting": (16, 4), "answered": (24, 32)},
    ),
    "RequestHeader": (
        64,
        {
            "epoch": (0, 8),
            "layer": (8, 4),
            "rows": (12, 4),
            "trace_id": (16, 16),
            "span_id": (32, 8),
            "trace_flags": (40, 4),
        },
    ),
    "ResponseHeader": (
        256,
        {
            "epoch": (0, 8),
            "compute_ns": (8, 8),
            "generation": (16, 8),
            "status": (24, 4),
            "layer": (28, 4),
            "rows": (32, 4),
            "error_text": (64, 192),
        },
    ),
}


def test_the_layout_is_the_one_of_its_version() -> None:
    """Processes of one ABI version lay out every byte alike: an accidental change of a field fails here."""
    named = {
        structure: (size, {name: place for name, place in fields.items() if not name.startswith("reserved")})
        for structure, (size, fields) in _kernels.mailbox_layout().items()
    }
    assert named == ABI
    assert ABI_VERSION == _kernels.MAILBOX_ABI_VERSION
    assert (MAGIC.to_bytes(8, "little"), _kernels.MAILBOX_MAX_SERVERS) == (b"MBESBOX1", 16)


@pytest.mark.parametrize("structure", list(ABI))
def test_fields_cover_their_structure(structure: str) -> None:
    """The description that Python reads leaves no byte of a structure out."""
    size, fields = _kernels.mailbox_layout()[structure]
    end = 0
    for offset, nbytes in sorted(fields.values()):
        assert offset == end
        end = offset + nbytes
    assert end == size


@pytest.mark.parametrize("name", ["ReadyLine", "DoneLine", "RequestHeader", "ClientRecord"])
def test_flags_have_their_own_lines(name: str) -> None:
    """One 64-byte line each."""
    assert field_offsets()[name] == 64


@pytest.mark.parametrize(
    "name",
    [
        *("shutdown", "next_epoch", "doorbell", "error_word"),
        *("servers", "clients", "identity", "refusals", "rejections"),
    ],
)
def test_words_of_different_writers_lie_on_different_lines(name: str) -> None:
    """A header word that someone writes at run time starts a line."""
    assert field_offsets()[f"Header.{name}"] % 64 == 0


def test_header_in_memory_reads_back() -> None:
    """What create wrote is what the description says, and the regions follow one another."""
    shape = geometry(num_servers=2)
    with new_mailbox(shape) as box, open(f"/dev/shm/{box.name}", "rb") as segment:
        content = segment.read(field_offsets()["Header"])
        word = {
            name: header_word(content, name)
            for name in (
                *("magic", "total_bytes", "geometry", "flags_offset", "requests_offset"),
                *("responses_offset", "request_stride", "response_stride"),
            )
        }
        regions, slots, servers = shape.regions(), shape.num_slots, shape.num_servers
        assert (word["magic"], word["total_bytes"], regions.total) == (MAGIC, box.nbytes, box.nbytes)
        assert (word["flags_offset"], word["requests_offset"]) == (regions.flags, regions.requests)
        assert (word["responses_offset"], word["request_stride"]) == (
            regions.responses,
            regions.request_stride,
        )
        assert word["response_stride"] == regions.response_stride
        sizes = word["geometry"].to_bytes(32, "little")
        assert [int.from_bytes(sizes[at : at + 4], "little") for at in (4, 20)] == [48, 2]
        assert word["requests_offset"] >= word["flags_offset"] + 64 * slots * (1 + servers)
        assert word["responses_offset"] == word["requests_offset"] + slots * word["request_stride"]
        assert box.nbytes == word["responses_offset"] + slots * servers * word["response_stride"]
