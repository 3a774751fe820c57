"""Guards loading on several threads: the same bytes as on one, and an end in order when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from expert_service import loader
from expert_service.errors import AlreadyLoaded, LoadCancelled
from expert_service.host import ExpertHost, LoadSettings
from expert_service.loader import LoadPlan, load_experts, plan_load
from expert_service.placement import ThreadPlacement
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.mapped_reader import MappedReader
from moebius.experts.slices import ExpertSlice, SliceRequest
from moebius.kernels import ExpertEngine
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.quantised_checkpoints import QuantisedMoe

MODEL = TinyMoe(num_experts=9, num_layers=4)


def prepared(model: Path, dtype: str = "keep") -> tuple[ExpertEngine, LoadPlan, ExpertSlice]:
    plan = plan_load(read_geometry(model), str(model), "int4" if dtype == "int4" else "keep")
    geometry = plan.model
    engine = ExpertEngine(
        geometry.hidden_size,
        geometry.moe_intermediate_size,
        geometry.num_experts,
        geometry.num_layers,
        weight_format=plan.gate_up_formats,
        down_format=plan.down_formats,
        num_threads=1,
    )
    return engine, plan, ExpertSlice(0, geometry.num_experts, 0, geometry.moe_intermediate_size)


def loading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("load-")]


def never() -> bool:
    return False


@pytest.mark.parametrize("dtype", ["keep", "int4"])
def test_the_number_of_threads_changes_no_byte(tmp_path: Path, dtype: str) -> None:
    """Layers are reported in order, with the same errors and bytes read."""
    model = MODEL.write(tmp_path)
    found = {}
    for threads in (1, 3, 16):
        engine, plan, part = prepared(model, dtype)
        done = list(load_experts(engine, plan, part, never, threads))
        assert [layer.layer for layer in done] == list(plan.model.moe_layers)
        packed = [engine.packed_expert(layer, 4).tobytes() for layer in plan.model.moe_layers]
        found[threads] = (packed, [(layer.source_bytes, round(layer.relative_error, 12)) for layer in done])
    assert found[1] == found[3] == found[16]
    assert found[1][1][0][0] == 9 * 3 * 48 * 56 * 4
    assert loading_threads() == []


@pytest.mark.parametrize("servers", [1, 2])
def test_files_are_dropped_where_memory_cannot_hold_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    """Files are kept beside what all servers pack from them, with a fifth for others; the threads share what
    is kept.
    """
    model = MODEL.write(tmp_path)
    files = MODEL.num_layers * 9 * 3 * 48 * 56 * 4 * servers
    limits: list[int | None] = []

    def reader(cached_bytes: int | None = None) -> MappedReader:
        limits.append(cached_bytes)
        return MappedReader(cached_bytes)

    monkeypatch.setattr(loader, "MappedReader", reader)
    for memory in (int(2.6 * files), int(2.4 * files)):
        engine, plan, part = prepared(model)
        monkeypatch.setattr(loader, "available_memory", lambda memory=memory: memory)
        assert len(list(load_experts(engine, plan, part, never, 3, num_servers=servers))) > 0
    assert limits == [None] * 3 + [loader.CACHED_BYTES // 3] * 3


def test_an_error_ends_all_threads(tmp_path: Path) -> None:
    """The first error is raised, layers before it were reported, and no thread is left."""
    order = np.zeros(160, np.int32)
    name = "model.layers.1.mlp.experts.1.down_proj.g_idx"
    engine, plan, part = prepared(QuantisedMoe("gptq_int4_g32").write(tmp_path, {name: order}))
    done = []
    with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj\.g_idx' reorders"):
        done.extend(load_experts(engine, plan, part, never, 2))
    assert loading_threads() == []


@pytest.mark.parametrize("after", [0, 5])
def test_cancelling_ends_all_threads(tmp_path: Path, after: int) -> None:
    """Every thread ends at its next expert."""
    engine, plan, part = prepared(MODEL.write(tmp_path))
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > after

    with pytest.raises(LoadCancelled):
        list(load_experts(engine, plan, part, cancelled, 3))
    assert loading_threads() == []
    assert after <= len(asked) <= after + 3


def test_leaving_early_ends_all_threads(tmp_path: Path) -> None:
    """A refusal of a layer closes the iterator."""
    engine, plan, part = prepared(MODEL.write(tmp_path))
    layers = load_experts(engine, plan, part, never, 3)
    assert next(layers).layer == 0
    closing: Callable[[], None] = layers.close  # type: ignore[attr-defined]
    closing()
    assert loading_threads() == []


def test_a_refused_load_may_be_repeated(tmp_path: Path) -> None:
    """After an error the host loads something else; after success nothing."""
    broken = MODEL.write(tmp_path / "broken", {"model.layers.2.mlp.experts.8.up_proj.weight": None})
    whole = MODEL.write(tmp_path / "whole")
    settings = LoadSettings(calibrate_kernels=False)
    host = ExpertHost(ThreadPlacement(-1, 2, ()), lambda *_: None, lambda: None, settings)
    with pytest.raises(CheckpointError):
        host.load(SliceRequest(str(broken)))
    assert host.load(SliceRequest(str(whole))).weight_format == "float32"
    with pytest.raises(AlreadyLoaded):
        host.load(SliceRequest(str(whole)))
