"""Guards the one layout: C++ and Python agree on every byte, and flags never share a cache line."""

from __future__ import annotations

import ctypes

import pytest

from moebius import _kernels, mailbox_layout
from tests.helpers.mailbox import geometry, new_mailbox


def test_offsets_agree() -> None:
    """Every field named in either description lies at the same offset in both."""
    assert _kernels.mailbox_offsets() == mailbox_layout.offsets()
    assert _kernels.MAILBOX_ABI_VERSION == mailbox_layout.ABI_VERSION


@pytest.mark.parametrize("name", ["ReadyLine", "DoneLine", "RequestHeader", "ClientRecord"])
def test_flags_have_their_own_lines(name: str) -> None:
    """One 64-byte line each."""
    assert _kernels.mailbox_offsets()[name] == 64


@pytest.mark.parametrize(
    "name",
    [
        *("shutdown", "next_epoch", "doorbell", "error_word"),
        *("servers", "clients", "identity", "refusals", "rejections"),
    ],
)
def test_words_of_different_writers_lie_on_different_lines(name: str) -> None:
    """A header word that someone writes at run time starts a line."""
    assert _kernels.mailbox_offsets()[f"Header.{name}"] % 64 == 0


def test_header_in_memory_reads_back() -> None:
    """What create wrote is what the mirror reads, and the regions follow one another."""
    shape = geometry(num_servers=2)
    with new_mailbox(shape) as box, open(f"/dev/shm/{box.name}", "rb") as segment:
        content = segment.read(ctypes.sizeof(mailbox_layout.Header))
        header = mailbox_layout.Header.from_buffer_copy(content)
        assert (header.magic, header.total_bytes) == (mailbox_layout.MAGIC, box.nbytes)
        assert (header.geometry.hidden_size, header.geometry.num_servers) == (48, 2)
        slots, servers = shape.num_slots, shape.num_servers
        assert header.requests_offset >= header.flags_offset + 64 * slots * (1 + servers)
        assert header.responses_offset == header.requests_offset + slots * header.request_stride
        assert box.nbytes == header.responses_offset + slots * servers * header.response_stride
