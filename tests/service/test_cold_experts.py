"""Guards expert servers whose experts are on disk: the same outputs, one packing, and faults of the disk."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import expert_service.loader as loader_module
from expert_service.host import ExpertHost, LoadSettings
from expert_service.main import ExpertProcess
from expert_service.metrics import make_registry
from expert_service.placement import ThreadPlacement
from moebius.config import MoebiusConfig
from moebius.errors import StartupError
from moebius.experts.slices import SliceRequest
from moebius.kernels import DamagedExpert, ExpertEngine, SegmentError
from moebius.kernels.weight_segment import WeightSegment, segment_path
from moebius.process.operations import registry_text
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.waiting import wait_until

EXPERTS = 7
# Some rows choose each expert, so that a layer is computed in turns.
IDS = np.array([[0, 6], [1, 5], [2, 4], [3, 0], [6, 1], [5, 2]], np.int32)


def nothing(*_: object) -> None:
    """Called by the host."""


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> SliceRequest:
    model = TinyMoe(num_experts=EXPERTS, num_layers=2)
    return SliceRequest(str(model.write(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def hosts() -> Iterator[list[ExpertHost]]:
    """Those that a test makes; they let go of their files."""
    made = list[ExpertHost]()
    yield made
    for host in made:
        host.drain(60)


# A packed expert of the model, and what its slot takes beside it.
SLOT_BYTES = 3 * 48 * 64 * 4 + (16 << 10)


def loaded(
    hosts: list[ExpertHost], request: SliceRequest, directory: Path | None, slots: int = 0
) -> ExpertHost:
    """A host with memory for `slots` experts of each layer; 0: for all."""
    settings = LoadSettings(
        expert_weights_dir=str(directory or ""), calibrate_kernels=False, slot_bytes=2 * slots * SLOT_BYTES
    )
    host = ExpertHost(ThreadPlacement(-1, 2, ()), nothing, nothing, settings)
    hosts.append(host)
    host.load(request)
    return host


def outputs(host: ExpertHost, ids: Any = IDS) -> list[bytes]:
    assert host.loaded is not None
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((len(ids), host.loaded.model.hidden_size)).astype(np.float32)
    weights = rng.random(ids.shape).astype(np.float32)
    return [host.forward(layer, rows, ids, weights).tobytes() for layer in host.loaded.model.moe_layers]


def end(hosts: list[ExpertHost], others: set[threading.Thread]) -> None:
    """Ends them all, so that their files are free. `others`: threads that were there before."""
    for host in hosts:
        host.drain(60)
    hosts.clear()
    del host
    for thread in set(threading.enumerate()) - others:
        if thread.name == "weights-watch":
            thread.join(60)
    gc.collect()


def test_a_restart_reads_the_file_and_answers_alike(
    tmp_path: Path, request_: SliceRequest, hosts: list[ExpertHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in memory, packed to disk, and found there: the same bits; the second one reads no checkpoint."""
    others = set(threading.enumerate())
    expected = outputs(loaded(hosts, request_, None))
    host = loaded(hosts, request_, tmp_path, 4)
    assert outputs(host) == expected
    text = registry_text(make_registry(host)).decode()
    assert "moebius:expert_cold_used_total 14.0" in text
    assert "moebius:expert_cold_missed_total 0.0" not in text
    del host
    end(hosts, others)
    monkeypatch.setattr(loader_module, "plan_load", None)
    assert outputs(loaded(hosts, request_, tmp_path, 4)) == expected


def test_a_truncated_file_is_written_again(
    tmp_path: Path, request_: SliceRequest, hosts: list[ExpertHost]
) -> None:
    """While the server serves: calls wait for the checkpoint; one line names the file and the place."""
    expected = outputs(loaded(hosts, request_, None))
    host = loaded(hosts, request_, tmp_path, 3)
    path = segment_path(str(tmp_path), 0)
    segment = WeightSegment.open(path)
    place = segment.layers[0].offset + 5 * segment.layers[0].expert_bytes
    segment.close()
    with capture_logs() as logs:
        os.truncate(path, place)
        assert outputs(host) == expected
        wait_until(lambda: any("packed again" in line["event"] for line in logs))
    line = next(line for line in logs if "packed again" in line["event"])
    assert str(path) in line["reading"]
    assert host.is_serving
    assert host.problem == ""


def test_without_a_checkpoint_only_what_needs_the_lost_expert_is_refused(
    tmp_path: Path, hosts: list[ExpertHost]
) -> None:
    """Others are answered, and the reason is the server's problem, which operators see."""
    model = TinyMoe(num_experts=EXPERTS, num_layers=2).write(tmp_path / "model")
    host = loaded(hosts, SliceRequest(str(model)), tmp_path, 3)
    expected = outputs(host, IDS[:1] * 0)
    path = segment_path(str(tmp_path), 0)
    for file in model.glob("*.safetensors"):
        file.unlink()
    os.truncate(path, 4 << 20)
    with pytest.raises(DamagedExpert, match=r"is damaged on disk or in memory: .*"):
        outputs(host)
    assert outputs(host, IDS[:1] * 0) == expected
    wait_until(lambda: "damaged on disk or in memory" in host.problem)


def test_a_full_disk_is_one_line(
    tmp_path: Path, request_: SliceRequest, hosts: list[ExpertHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing that finds no room ends the start, with what there is."""

    def no_room(*_: object) -> None:
        raise SegmentError("expert weights f: no room for 7 MiB")

    monkeypatch.setattr(ExpertEngine, "load_expert", no_room)
    with pytest.raises(StartupError, match="no room for 7 MiB"):
        loaded(hosts, request_, tmp_path, 3)


def test_memory_that_holds_too_few_is_named(
    tmp_path: Path, request_: SliceRequest, hosts: list[ExpertHost]
) -> None:
    """Fewer than three of a layer, and settings that do not say how much memory there is."""
    with pytest.raises(ValueError, match="3 of each layer take"):
        loaded(hosts, request_, tmp_path, 1)
    experts = MoebiusConfig().experts.model_copy(update={"cold_experts": "disk"})
    with pytest.raises(StartupError, match="--expert-memory-gib"):
        ExpertProcess(MoebiusConfig().model_copy(update={"experts": experts}))
