"""Guards that packed experts outlive their server: what is used again, what is packed again, who says so."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs

import expert_service.host as host_module
import expert_service.loader as loader_module
import moebius.models.read as read_module
from expert_service.errors import LoadCancelled, RequantiseError
from expert_service.host import ExpertHost, LoadSettings
from expert_service.placement import ThreadPlacement
from expert_service.segment import LoadRecord, checkpoint_signature, find_load_record
from moebius import _kernels
from moebius.checkpoint.errors import CheckpointError
from moebius.errors import USER_ERROR_EXIT, StartupError
from moebius.experts.slices import SliceRequest, parse_expert_dtype
from moebius.kernels import ExpertEngine, SegmentError
from moebius.kernels.weight_segment import WeightSegment, segment_path
from moebius.network.grpc_channels import open_channel
from protos import expert_pb2, expert_pb2_grpc
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.expert_cluster import make_config
from tests.helpers.quantised_checkpoints import QuantisedMoe
from tests.helpers.waiting import wait_until
from tests.helpers.warm_processes import ExpertProcess

MODEL = TinyMoe(num_experts=5, num_layers=3)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


# What packing makes of checkpoints of the test suite, by `weights_digest`. Who changes packing on purpose
# raises kAbiVersion of kernels/moe/weight_segment.h, so that no server takes older bytes for its own, and
# changes this table.
ABI_VERSION = 6
PACKED = {
    "float32": 0x0947FCC6F29273EA,
    "bfloat16": 0x1D19E503C7A91ED3,
    "float16": 0x38F8942A669BFBE2,
    "fp8_block": 0x409000DFD2F8D70A,
    "fp8_tensor": 0x05B5CFE701DE1419,
    "int8": 0x9A50CDE78A388B7B,
    "int8_g32_f16": 0xCD91C25F274132AA,
    "int8_w8a8": 0x9A50CDE78A388B7B,
    "compressed_int4_g32": 0xAA1DC7A21B9A7F87,
    "compressed_int4_g64_zeros": 0xFCC8A4479A1C78A4,
    "awq_int4_g32": 0x880FF6882786B7C3,
    "gptq_int4_g64_symmetric": 0x91F3AE9BDE952A92,
    "nvfp4": 0x2DF1B413F29B5BEE,
}
REQUANTISED = {"int8": 0x6A1C36656D0587AE, "int4": 0xBAC8E500A47B4F4F}


def nothing(*_: object) -> None:
    """Called by the host."""


def new_host(
    memory: Path,
    on_progress: Callable[[], None] = nothing,
    **settings: Any,
) -> ExpertHost:
    chosen = LoadSettings(expert_weights_dir=str(memory), **{"calibrate_kernels": False, **settings})
    return ExpertHost(ThreadPlacement(-1, 1, ()), nothing, nothing, chosen, on_progress)


def end(host: ExpertHost) -> None:
    """Once what a predecessor had packed has been compared; the segment is another's afterwards."""
    found = host.loaded
    if found is not None and found.engine.segment_state in ("complete", "partial"):
        wait_until(lambda: host.verify_pass_seconds > 0)
    host.drain(60)
    end_of_watch()


def watches() -> set[threading.Thread]:
    """Returns the threads that compare experts."""
    return {thread for thread in threading.enumerate() if thread.name == "weights-watch"}


# Of hosts that tests of other files have left in this process.
_EARLIER: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _own_watches() -> None:
    _EARLIER.update(watches())


def end_of_watch() -> None:
    """Ends the watches of this test's hosts, which are drained."""
    for thread in watches() - _EARLIER:
        thread.join(60)
        assert not thread.is_alive()


def outputs(host: ExpertHost) -> list[bytes]:
    loaded = host.loaded
    assert loaded is not None
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((6, loaded.model.hidden_size)).astype(np.float32)
    ids = rng.integers(0, loaded.model.num_experts, (6, loaded.model.top_k)).astype(np.int32)
    weights = rng.random(ids.shape).astype(np.float32)
    return [host.forward(layer, rows, ids, weights).tobytes() for layer in loaded.model.moe_layers]


def serve(memory: Path, request: SliceRequest, **settings: Any) -> list[bytes]:
    """Outputs of a server that loads, computes and ends."""
    host = new_host(memory, **settings)
    host.load(request)
    found = outputs(host)
    end(host)
    return found


def packed_by(memory: Path, request: SliceRequest, stop_after: int = 0) -> int:
    """Returns the number of experts that a server packs until it has all, or is stopped."""
    packed: list[None] = []
    hosts: list[ExpertHost] = []

    def on_progress() -> None:
        packed.append(None)
        if len(packed) == stop_after:
            hosts[0].cancel_load()

    hosts.append(new_host(memory, on_progress=on_progress))
    with pytest.raises(LoadCancelled) if stop_after else contextlib.nullcontext():
        hosts[0].load(request)
    end(hosts[0])
    hosts.clear()  # it and the function above know each other
    return len(packed)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the checkpoint, or measuring kernels, fails."""

    def fail(*_: object) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(loader_module, "plan_load", fail)
    monkeypatch.setattr(loader_module, "load_experts", fail)
    monkeypatch.setattr(read_module, "read_geometry", fail)
    monkeypatch.setattr(host_module, "expert_parts", fail)
    monkeypatch.setattr(ExpertEngine, "calibrate", fail)


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_second_server_reads_nothing_that_grows(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, calibrate: bool
) -> None:
    """No experts are located, no kernels measured, nothing of the checkpoint read; the bits are the same."""
    request = SliceRequest(str(MODEL.write(tmp_path)), weight_dtype="int8")
    first = serve(memory, request, calibrate_kernels=calibrate)
    forbid(monkeypatch)
    with capture_logs() as logs:
        assert serve(memory, request, calibrate_kernels=calibrate) == first
    assert [line["which"] for line in logs if line["event"] == "packed experts are there already"] == [
        "complete"
    ]
    compared = [line for line in logs if line["event"] == "checksums of packed experts compared"]
    assert [(line["experts"], line["damaged"]) for line in compared] == [(15, 0)]


def test_what_the_record_says_is_what_was_found(tmp_path: Path, memory: Path) -> None:
    """The same answers to `Info` and metrics as from the server that read the checkpoint."""
    request = SliceRequest(str(MODEL.write(tmp_path)), weight_dtype="int4", split_count=2, split_index=1)
    found = []
    for _ in range(2):
        host = new_host(memory)
        loaded = host.load(request)
        engine = loaded.engine
        facts = (loaded.model, loaded.part, loaded.weight_format, loaded.relative_errors, loaded.identity)
        found.append((*facts, engine.packed_bytes, engine.weights_digest, engine.num_threads))
        end(host)
        del host, loaded, engine
    assert found[0] == found[1]
    assert found[0][3][0] > 0


def test_files_that_were_only_touched_are_looked_at_but_not_packed(tmp_path: Path, memory: Path) -> None:
    """Copied or touched files have the same fingerprint: all experts are used as they are."""
    model = MODEL.write(tmp_path)
    first = serve(memory, SliceRequest(str(model)))
    os.utime(model / "config.json")
    with capture_logs() as logs:
        assert serve(memory, SliceRequest(str(model))) == first
    events = [line["event"] for line in logs]
    assert "files of the checkpoint were written since; they are read again" in events
    assert sum(line.get("source_bytes", 0) for line in logs if line["event"] == "layer packed") == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("weights", "it holds other weights: checkpoint="),
        ("dtype", "it holds other weights: expert_dtype=keep, expected expert_dtype=int8"),
        ("exact", "it holds other weights: batch_invariant_experts=no, expected batch_invariant_experts=yes"),
        ("top_k", "it holds other weights: top_k=3, expected top_k=2"),
    ],
)
def test_other_weights_are_repacked(tmp_path: Path, memory: Path, change: str, reason: str) -> None:
    """Another checkpoint or setting is named, and what is computed is what a fresh server would."""
    model, settings, request = MODEL.write(tmp_path / "model"), dict[str, Any](), dict[str, Any]()
    serve(memory, SliceRequest(str(model)))
    if change == "weights":
        TinyMoe(num_experts=5, num_layers=3, seed=9).write(tmp_path / "model")
    elif change == "dtype":
        request["weight_dtype"] = "int8"
    elif change == "top_k":
        request["top_k"] = 2
    else:
        settings["batch_invariant_experts"] = True
    with capture_logs() as logs:
        found = serve(memory, SliceRequest(str(model), **request), **settings)
    reasons = [line["reason"] for line in logs if line["event"] == "experts are packed again"]
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert WeightSegment.open(segment_path(str(memory), 0)).generation == 2
    fresh = memory / "fresh"
    fresh.mkdir()
    assert serve(fresh, SliceRequest(str(model), **request), **settings) == found


def test_a_load_that_was_broken_off_goes_on(tmp_path: Path, memory: Path) -> None:
    """The load goes on with what is missing alone, and at once: what was broken off leaves no reference
    behind that a garbage collection would have to find before the segment is free again.
    """
    request = SliceRequest(str(MODEL.write(tmp_path)))
    gc.disable()
    try:
        assert packed_by(memory, request, stop_after=7) == 7
        assert packed_by(memory, request) == 8
    finally:
        gc.enable()
    fresh = memory / "fresh"
    fresh.mkdir()
    assert serve(fresh, request) == serve(memory, request)


def test_a_server_without_a_checkpoint_names_what_is_missing(tmp_path: Path, memory: Path) -> None:
    """Packed experts do not hide that their checkpoint is gone or unreadable."""
    model = MODEL.write(tmp_path)
    serve(memory, SliceRequest(str(model)))
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        new_host(memory).load(SliceRequest(str(model)))


def test_a_requantisation_that_is_not_allowed_any_more_is_refused(tmp_path: Path, memory: Path) -> None:
    """Limits hold for what a predecessor packed, too."""
    request = SliceRequest(str(MODEL.write(tmp_path)), weight_dtype="int4")
    serve(memory, request)
    with pytest.raises(RequantiseError, match=r"--max-requantise-error allows 0\.001"):
        new_host(memory, max_requantise_error=0.001).load(request)


def test_memory_that_can_not_be_had_is_named(tmp_path: Path) -> None:
    """A directory that is not there."""
    with pytest.raises(StartupError, match=r"/none/expert-0\.weights can not be opened: No such file"):
        new_host(tmp_path / "none").load(SliceRequest(str(MODEL.write(tmp_path))))


def test_memory_that_runs_out_while_loading_is_named(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for the user, not a traceback; experts that were packed stay for the next try."""
    request, packed = SliceRequest(str(MODEL.write(tmp_path))), list[None]()

    def no_room(self: ExpertEngine, layer: int, *rest: Any) -> Any:
        packed.append(None)
        if layer == 2:
            raise SegmentError("expert weights f: no room")
        return load_expert(self, layer, *rest)

    load_expert = ExpertEngine.load_expert
    monkeypatch.setattr(ExpertEngine, "load_expert", no_room)
    with pytest.raises(StartupError, match="no room"):
        new_host(memory).load(request)
    monkeypatch.undo()
    gc.collect()  # the error knows the engine
    assert packed_by(memory, request) == 5


def test_a_record_of_another_version_is_no_record(tmp_path: Path, memory: Path) -> None:
    """What a newer or older server noted is not misread: the checkpoint is looked at instead."""
    request = SliceRequest(str(MODEL.write(tmp_path)))
    first = serve(memory, request)
    path = segment_path(str(memory), 0)
    record = find_load_record(path, request, exact=False)
    assert record is not None
    assert record == LoadRecord.from_json(record.to_json())
    for text in ("{}", "[]", '{"model": {}}', record.to_json().replace('"isa"', '"level"')):
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
            LoadRecord.from_json(text)
    assert serve(memory, request) == first


def test_packing_changes_only_with_the_version(tmp_path: Path) -> None:
    """A server of this version believes what any other of this version packed."""
    assert _kernels.WEIGHT_SEGMENT_ABI_VERSION == ABI_VERSION
    quiet = LoadSettings(calibrate_kernels=False)
    found = {}
    for scheme in PACKED:
        model = QuantisedMoe(scheme).write(tmp_path / scheme)
        host = ExpertHost(ThreadPlacement(-1, 1, ()), nothing, nothing, quiet)
        found[scheme] = host.load(SliceRequest(str(model))).engine.weights_digest
    assert found == PACKED
    model, found = MODEL.write(tmp_path / "plain"), {}
    for dtype in REQUANTISED:
        host = ExpertHost(ThreadPlacement(-1, 1, ()), nothing, nothing, quiet)
        request = SliceRequest(str(model), weight_dtype=parse_expert_dtype(dtype))
        found[dtype] = host.load(request).engine.weights_digest
    assert found == REQUANTISED


def test_the_signature_follows_every_change(tmp_path: Path) -> None:
    """Another file, other contents, a file replaced by a copy; and not what is no part of a checkpoint."""
    model = MODEL.write(tmp_path)
    seen = [checkpoint_signature(SliceRequest(str(model)))]
    (model / "README.md").write_text("words")
    assert checkpoint_signature(SliceRequest(str(model))) == seen[0]
    weights = sorted(model.glob("*.safetensors"))[0]
    copy = weights.with_name("copy")
    for change in (
        lambda: (model / "model-extra.safetensors").touch(),
        lambda: os.utime(weights, ns=(1, 1)),
        lambda: (copy.write_bytes(weights.read_bytes()), copy.replace(weights)),
    ):
        change()
        seen.append(checkpoint_signature(SliceRequest(str(model))))
    assert len(set(seen)) == len(seen)


def compute(address: str, model: TinyMoe) -> bytes:
    """Returns one request by gRPC, asked again until the server serves."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((4, model.hidden_size)).astype(np.float32)
    ids = rng.integers(0, model.num_experts, (4, model.top_k)).astype(np.int32)
    weights = rng.random(ids.shape).astype(np.float32)
    record = expert_pb2.ComputeRequest(
        epoch=1,
        layer=1,
        rows=4,
        dtype=expert_pb2.DTYPE_FLOAT32,
        hidden_states=rows.tobytes(),
        topk_ids=ids.tobytes(),
        topk_weights=weights.tobytes(),
    )
    make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
    end = time.monotonic() + 60
    while True:
        with open_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                return bytes(next(make_stub(channel).Compute(iter([record]))).output)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                    raise
                time.sleep(0.05)


def test_a_killed_server_comes_back_without_loading(tmp_path: Path, memory: Path) -> None:
    """Two runs of the process by hand on one directory, as in a Pod, with SIGKILL between them."""
    model, log = MODEL.write(tmp_path / "model"), tmp_path / "log"
    config = make_config(model, tmp_path, expert_weights_dir=str(memory))
    found = []

    def loads() -> list[str]:
        """The line of each run about its load, which names its phases."""
        return [line for line in log.read_text().splitlines() if "experts loaded" in line]

    for run in (1, 2):
        process: ExpertProcess = ExpertProcess(config, log)
        try:
            found.append(compute(config.experts.expert_address, MODEL))
            # A server answers before it logs that it has loaded.
            wait_until(lambda run=run: len(loads()) == run)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert found[0] == found[1]
    assert ["packing experts" in line for line in loads()] == [True, False]
    assert log.read_text().count("packed experts are there already") == 1


def test_two_servers_of_one_file_are_one_too_many(tmp_path: Path, memory: Path) -> None:
    """The second process ends with a line that names the file; the first one serves on."""
    model = MODEL.write(tmp_path / "model")
    config = make_config(model, tmp_path, expert_weights_dir=str(memory))
    (tmp_path / "second").mkdir()
    other = make_config(model, tmp_path / "second", expert_weights_dir=str(memory))
    first = ExpertProcess(config, tmp_path / "log")
    try:
        output = compute(config.experts.expert_address, MODEL)
        second = ExpertProcess(other, tmp_path / "second.log")
        assert second.wait(60) == USER_ERROR_EXIT
        assert (
            "expert-0.weights: another expert server uses this file" in (tmp_path / "second.log").read_text()
        )
        assert compute(config.experts.expert_address, MODEL) == output
    finally:
        first.kill()
        first.wait()
