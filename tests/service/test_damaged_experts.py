"""Guards an expert server whose memory changes: it finds it, packs it again, and answers nothing wrong."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import expert_service.integrity as integrity_module
from expert_service.host import ExpertHost, LoadSettings
from expert_service.metrics import make_registry
from expert_service.placement import ThreadPlacement
from moebius.experts.slices import SliceRequest
from moebius.kernels import DamagedExpert
from moebius.kernels.weight_segment import WeightSegment, segment_path
from moebius.process.operations import registry_text
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.waiting import wait_until

MODEL = TinyMoe(num_experts=5, num_layers=3)
REPAIRED = "an expert was damaged in memory and is packed again"
LOST = "an expert is damaged in memory and cannot be packed again: what needs it is refused"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def hosts() -> Iterator[list[ExpertHost]]:
    """Those that a test makes; ended after it."""
    made: list[ExpertHost] = []
    yield made
    for host in made:
        host.drain(60)


def loaded(
    hosts: list[ExpertHost], request: SliceRequest, memory: Path | None, **settings: Any
) -> ExpertHost:
    """Returns a host that serves; in private memory where there is none."""
    directory = "" if memory is None else str(memory)
    chosen = LoadSettings(calibrate_kernels=False, expert_weights_dir=directory, **settings)
    host = ExpertHost(ThreadPlacement(-1, 1, ()), lambda *_: None, lambda: None, chosen)
    hosts.append(host)
    host.load(request)
    return host


def outputs(host: ExpertHost, only: tuple[int, ...] = tuple(range(5))) -> list[bytes]:
    """Returns the outputs of all layers, with these experts."""
    found = host.loaded
    assert found is not None
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((len(only), found.model.hidden_size)).astype(np.float32)
    ids = np.array([[expert] * found.model.top_k for expert in only], np.int32)
    weights = rng.random(ids.shape).astype(np.float32)
    return [host.forward(layer, rows, ids, weights).tobytes() for layer in found.model.moe_layers]


def address_of(host: ExpertHost, layer: int, expert: int) -> int:
    """Returns the address of its packed bytes."""
    assert host.loaded is not None
    return int(host.loaded.engine.packed_expert(layer, expert).ctypes.data)


def flip(host: ExpertHost, memory: Path | None, layer: int, expert: int, at: int = 17) -> None:
    """A bit, as faulty memory does; of a segment by another process's mapping, its own is read-only."""
    if memory is None:
        ctypes.c_uint8.from_address(address_of(host, layer, expert) + at).value ^= 4
        return
    segment = WeightSegment.open(segment_path(str(memory), 0))
    place = segment.layers[layer]
    segment.data[place.offset + place.experts.index(expert) * place.expert_bytes + at] ^= 4


def compared_twice(host: ExpertHost) -> None:
    """Waits until every expert has been compared since now."""
    assert host.loaded is not None
    engine = host.loaded.engine
    begin = engine.stats().verified_bytes
    total = sum(layout.expert_bytes * 5 for layout in host.loaded.layouts)
    wait_until(lambda: engine.stats().verified_bytes >= begin + 2 * total)


@pytest.mark.parametrize("shared", [True, False])
def test_flipped_bits_of_a_running_server_are_found_and_repaired(
    tmp_path: Path, memory: Path, hosts: list[ExpertHost], shared: bool
) -> None:
    """Damage is found in the background, within the interval; there are one line, a counter, and the bits of
    before.
    """
    place = memory if shared else None
    host = loaded(hosts, SliceRequest(str(MODEL.write(tmp_path))), place, verify_interval_s=0.2)
    expected = outputs(host)
    with capture_logs() as logs:
        flip(host, place, 1, 3)
        flip(host, place, 2, 0, at=200)
        compared_twice(host)
        wait_until(lambda: b"moebius:expert_repaired_total 2.0" in registry_text(make_registry(host)))
    assert outputs(host) == expected
    lines = [line for line in logs if line["log_level"] == "error"]
    assert {line["event"] for line in lines} == {REPAIRED}
    assert sorted((line["layer"], line["expert"]) for line in lines) == [(1, 3), (2, 0)]
    text = registry_text(make_registry(host))
    assert b"moebius:expert_damaged_total 2.0" in text
    assert b"moebius:expert_refused 0.0" in text
    assert (host.damages, host.problem) == (2, "")


@pytest.mark.parametrize("shared", [True, False])
def test_nan_is_repaired_before_it_is_answered(
    tmp_path: Path, memory: Path, hosts: list[ExpertHost], shared: bool
) -> None:
    """Without any look in the background: an output that is not finite is suspect at once."""
    place = memory if shared else None
    host = loaded(hosts, SliceRequest(str(MODEL.write(tmp_path))), place)
    expected = outputs(host)
    for layer, expert in ((0, 4), (2, 1)):
        if place is None:
            ctypes.c_float.from_address(address_of(host, layer, expert) + 64).value = float("nan")
        else:
            segment = WeightSegment.open(segment_path(str(memory), 0))
            found = segment.layers[layer]
            begin = found.offset + expert * found.expert_bytes + 64
            segment.data[begin : begin + 4].view(np.float32)[0] = np.nan
        assert outputs(host) == expected
    assert host.damages == 2


def test_a_server_that_finds_packed_experts_answers_with_none_unseen(
    tmp_path: Path, memory: Path, hosts: list[ExpertHost]
) -> None:
    """The first answers are right although memory changed while no server was there; all is whole again."""
    request = SliceRequest(str(MODEL.write(tmp_path)))
    first = loaded(hosts, request, memory)
    expected = outputs(first)
    flip(first, memory, 0, 0)
    flip(first, memory, 2, 4)
    first.drain(60)
    hosts.clear()
    del first
    wait_until(lambda: free(memory))
    with capture_logs() as logs:
        host = loaded(hosts, request, memory)
        assert outputs(host) == expected
        wait_until(lambda: [line["event"] for line in logs if line["log_level"] == "error"] == [REPAIRED] * 2)
    assert host.loaded is not None
    assert host.loaded.engine.segment_state == "complete"
    segment = WeightSegment.open(segment_path(str(memory), 0))
    wait_until(lambda: segment.is_checked)
    assert segment.is_complete


def free(memory: Path) -> bool:
    """Returns whether no server holds the segment."""
    import fcntl

    with segment_path(str(memory), 0).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("what", ["gone", "other weights"])
def test_without_its_checkpoint_a_damaged_expert_is_refused(
    tmp_path: Path, memory: Path, hosts: list[ExpertHost], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The expert is refused by name, and no other one; once the files are there again it is packed, and
    computed with.
    """
    monkeypatch.setattr(integrity_module, "RETRY_S", 0.05)
    model = MODEL.write(tmp_path / "model")
    host = loaded(hosts, SliceRequest(str(model)), memory)
    expected, others = outputs(host), outputs(host, only=(0, 1, 2, 4))
    shutil.move(model, tmp_path / "kept")
    if what == "other weights":
        TinyMoe(num_experts=5, num_layers=3, seed=9).write(model)
    with capture_logs() as logs:
        flip(host, memory, 1, 3)
        assert host.loaded is not None
        assert not host.loaded.engine.verify_expert(1, 3)
        wait_until(lambda: bool(host.problem))
        with pytest.raises(DamagedExpert, match="layer 1: expert 3 is damaged in memory: "):
            outputs(host)
        assert outputs(host, only=(0, 1, 2, 4)) == others
    assert host.problem.startswith("layer 1, expert 3 is damaged in memory and cannot be packed again: ")
    wanted = "model" if what == "gone" else "the checkpoint gives other weights than those that were packed"
    assert wanted in host.problem
    assert [line["event"] for line in logs if line["log_level"] == "error"] == [LOST]
    assert b"moebius:expert_refused 1.0" in registry_text(make_registry(host))
    shutil.rmtree(model, ignore_errors=True)
    shutil.move(tmp_path / "kept", model)
    wait_until(lambda: not host.problem)
    assert outputs(host) == expected


def test_comparing_has_a_bounded_share_of_time(tmp_path: Path, hosts: list[ExpertHost]) -> None:
    """Each expert is compared once within the interval and not more often, by the bytes that were
    compared.
    """
    host = loaded(hosts, SliceRequest(str(MODEL.write(tmp_path))), None, verify_interval_s=3600.0)
    assert host.loaded is not None
    engine = host.loaded.engine
    total = sum(layout.expert_bytes * 5 for layout in host.loaded.layouts)
    wait_until(lambda: engine.stats().verified_bytes > 0)
    outputs(host)
    assert engine.stats().verified_bytes < total
    assert host.verify_pass_seconds == 0.0
