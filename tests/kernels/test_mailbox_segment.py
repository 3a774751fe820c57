"""Guards entry into a mailbox: a segment of another version, size or age is named, never used."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moebius import _kernels
from moebius._kernels_testing import EchoBackend
from moebius.mailbox import (
    AbiMismatch,
    ExpertComputeError,
    GeometryMismatch,
    Mailbox,
    MailboxError,
    MailboxServer,
    field_offsets,
)
from tests.helpers.mailbox import ROOT, Call, geometry, header_word, new_mailbox


def overwrite(name: str, offset: int, content: bytes) -> None:
    """Scribbles into a segment, as another version of the program would have written it."""
    with Path("/dev/shm", name).open("r+b") as segment:
        segment.seek(offset)
        segment.write(content)


def test_wrong_abi_names_both_versions() -> None:
    """Client and server refuse, naming found and expected."""
    with new_mailbox(geometry()) as box:
        overwrite(box.name, 8, (77).to_bytes(4, "little"))
        with pytest.raises(AbiMismatch, match="found 77, expected 4"):
            Mailbox.attach(box.name, 0)
        with pytest.raises(AbiMismatch, match="found 77, expected 4"):
            MailboxServer(box.name, 0, EchoBackend(48))


def test_foreign_segment_is_refused() -> None:
    """Shared memory of something else is not a mailbox."""
    with new_mailbox(geometry()) as box:
        overwrite(box.name, 0, b"\x01" * 8)
        with pytest.raises(AbiMismatch, match="not a Moebius mailbox"):
            Mailbox.attach(box.name, 0)


def test_wrong_geometry_names_both() -> None:
    """The sizes found and the sizes expected are in the message."""
    with new_mailbox(geometry()) as box:
        with pytest.raises(GeometryMismatch, match=r"hidden_size=48 .*expected .*hidden_size=64"):
            Mailbox.attach(box.name, 0, geometry(hidden_size=64))
        assert Mailbox.attach(box.name, 0, geometry()).geometry == geometry()
        with pytest.raises(ValueError, match=r"hidden_size 48.*backend has 32"):
            MailboxServer(box.name, 0, EchoBackend(32))


@pytest.mark.parametrize(
    ("field", "value"), [("layer", 5), ("layer", 2**32 - 1), ("rows", 8), ("rows", 2**32 - 1)]
)
def test_garbage_in_a_request_is_an_error_not_a_crash(field: str, value: int) -> None:
    """A server trusts no size it reads: it answers with an error and serves the next request."""
    offsets = field_offsets()
    with new_mailbox(geometry()) as box:
        requests = header_word(Path("/dev/shm", box.name).read_bytes(), "requests_offset")
        call = Call(box, 2)
        epoch = call.submit()
        place = requests + offsets[f"RequestHeader.{field}"]
        overwrite(box.name, place, value.to_bytes(4, "little"))
        server = MailboxServer(box.name, 0, EchoBackend(48))
        server.start()
        with pytest.raises(ExpertComputeError, match="beyond the mailbox's geometry"):
            call.collect(epoch)
        np.testing.assert_array_equal(call.collect(call.submit()), call.expected())
        server.stop()


@pytest.mark.parametrize("size", [0, 100, 4096])
def test_half_created_segment_is_not_attached(size: int) -> None:
    """Without the magic, stored last, a segment does not exist for anybody."""
    name = f"moebius-test-{secrets.token_hex(6)}"
    Path("/dev/shm", name).write_bytes(bytes(size))
    try:
        with pytest.raises(MailboxError, match="its creator has not"):
            Mailbox.attach(name, 0.02)
        assert Mailbox.is_stale(name)
        box = Mailbox.create(name, geometry())
        assert Mailbox.attach(name, 0).geometry == box.geometry
    finally:
        Mailbox.unlink(name)


def test_truncated_segment_is_refused() -> None:
    """A segment shorter than its geometry needs would be a SIGBUS later."""
    with new_mailbox(geometry()) as box:
        os.truncate(f"/dev/shm/{box.name}", box.nbytes - 4096)
        with pytest.raises(MailboxError, match="its geometry needs"):
            Mailbox.attach(box.name, 0)
        os.truncate(f"/dev/shm/{box.name}", box.nbytes)


def test_missing_segment_and_mode() -> None:
    """Only the owner may read activations; an absent name is named."""
    with new_mailbox(geometry()) as box:
        assert Path("/dev/shm", box.name).stat().st_mode & 0o777 == 0o600
    with pytest.raises(MailboxError, match=box.name):
        Mailbox.attach(box.name, 0.01)
    assert not Mailbox.unlink(box.name)


def test_name_in_use_is_refused_and_leftover_of_a_dead_process_is_replaced() -> None:
    """The kernel's locks tell a living mailbox from one whose launcher was killed."""
    name = f"moebius-test-{secrets.token_hex(6)}"
    program = (
        "import os, signal, sys\n"
        "from tests.helpers.mailbox import Mailbox, geometry\n"
        "box = Mailbox.create(sys.argv[1], geometry())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, name], cwd=ROOT, check=False)
    try:
        assert Mailbox.is_stale(name)
        box = Mailbox.create(name, geometry(num_servers=2))
        assert not Mailbox.is_stale(name)
        with pytest.raises(MailboxError, match="in use"):
            Mailbox.create(name, geometry())
        assert Mailbox.attach(name, 0).geometry == box.geometry
    finally:
        Mailbox.unlink(name)


@pytest.mark.parametrize("where", ["leftover", "made"])
def test_of_two_creators_one_gets_the_name(where: str) -> None:
    """However creators of one name get in each other's way, one mailbox comes of it and is the named one.

    The second runs as a whole inside the first: after that has found a leftover, or made its file.
    """
    name = f"moebius-test-{secrets.token_hex(6)}"
    if where == "leftover":
        Path("/dev/shm", name).write_bytes(bytes(4096))
    made: list[Mailbox] = []
    refused: list[MailboxError] = []

    def create(interleave: Callable[[str], None] | None) -> None:
        kernel_geometry = geometry().to_kernel()
        try:
            made.append(Mailbox(_kernels.Mailbox.create(name, kernel_geometry, -1, interleave), name))
        except MailboxError as error:
            refused.append(error)

    entered: list[str] = []

    def other_creator(at: str) -> None:
        if at == where and not entered:
            entered.append(at)
            create(None)

    try:
        create(other_creator)
        assert entered
        assert len(made) == len(refused) == 1
        assert "in use by a living process" in str(refused[0])
        made[0].shut_down()
        assert Mailbox.attach(name, 0).kernel.is_shut_down
    finally:
        Mailbox.unlink(name)


@pytest.mark.parametrize(
    ("field", "value"), [("num_slots", 65), ("max_rows", 0), ("num_servers", 17), ("dtype", "int8")]
)
def test_impossible_geometry_is_named(field: str, value: object) -> None:
    """The field and its value are in the message."""
    shape = geometry(**{field: value})
    with pytest.raises(ValueError, match=f"{field} = '?{value}"):
        Mailbox.create("moebius-test-never", shape)
