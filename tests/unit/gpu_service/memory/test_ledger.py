"""Guards the ledger: real figures per phase, the check before readiness, metrics, and the profile step."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from gpu_service.attention.registry import make_attention
from gpu_service.cache.kv_cache import KVCache
from gpu_service.device import TORCH_DTYPES
from gpu_service.loader.load import load_weights
from gpu_service.memory.device_memory import make_device_memory
from gpu_service.memory.ledger import MemoryLedger, export
from gpu_service.memory.plan import ACTIVATIONS, CONTEXT, DENSE, GRAPHS, KV, MemoryLine, MemoryPlan, StepSize
from gpu_service.memory.profile import profile_activations
from gpu_service.models.compose import build_model
from lab.random_model import RandomModelOptions, write_random_model
from moebius.errors import UserError
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.fake_memory import GIB, FakeMemory

PLAN = MemoryPlan(
    total=10 * GIB,
    budget=9 * GIB,
    lines=(MemoryLine(DENSE, 3 * GIB), MemoryLine(ACTIVATIONS, GIB), MemoryLine(KV, 4 * GIB)),
    page_bytes=GIB,
)


def loaded(memory: FakeMemory, kv_gib: int) -> tuple[MemoryLedger, list[str]]:
    """A start that loads 2 GiB of weights, has a step of 1 GiB, and then a pool."""
    shown: list[str] = []
    ledger = MemoryLedger(PLAN, memory, memory.use(), shown.append)
    memory.allocate(2 * GIB)
    ledger.reached(DENSE)
    memory.allocate(GIB)
    memory.free(GIB)
    ledger.activations(GIB)
    memory.allocate(kv_gib * GIB)
    ledger.reached(KV)
    return ledger, shown


def test_phases_are_measured_and_shown() -> None:
    """The plan first, then the same table with what each phase took; the context is what is not torch's."""
    memory = FakeMemory(10 * GIB, context=GIB // 2)
    ledger, shown = loaded(memory, 4)
    ledger.seal()
    assert {part: size / GIB for part, size in ledger.measured.items()} == {
        DENSE: 2,
        ACTIVATIONS: 1,
        KV: 4,
        CONTEXT: 0.5,
    }
    assert "before loading" in shown[0]
    assert "measured" not in shown[0]
    assert [line.split()[-2:] for line in shown[1].splitlines() if line.startswith(DENSE)] == [
        ["3.00", "2.00"]
    ]


def test_too_little_left_is_refused_before_serving() -> None:
    """Were it let through, a step could run out of memory."""
    ledger, _ = loaded(FakeMemory(10 * GIB, context=GIB - GIB // 8), 7)
    with pytest.raises(UserError, match=r"0\.12 GiB are free before serving, less than 0\.25 GiB"):
        ledger.seal()


def test_more_than_the_budget_is_warned_of() -> None:
    """The plan was wrong, but there is room: a warning with both numbers."""
    ledger, _ = loaded(FakeMemory(10 * GIB, context=GIB // 2), 7)
    with capture_logs() as logs:
        ledger.seal()
    assert [(log["log_level"], log["used_gib"], log["planned_gib"]) for log in logs] == [
        ("warning", "9.50", "9.00")
    ]


def test_what_is_allocated_later_is_of_its_part() -> None:
    """Graphs that are captured while the engine serves are measured with those before, and were foreseen."""
    memory = FakeMemory(10 * GIB)
    ledger, _ = loaded(memory, 2)
    ledger.seal()
    before = ledger.measured.get(GRAPHS, 0)
    with ledger.later(GRAPHS):
        memory.allocate(GIB)
    with suppress(ValueError), ledger.later(GRAPHS):
        memory.allocate(GIB)
        raise ValueError("of a capture")
    assert ledger.measured[GRAPHS] == before + 2 * GIB
    assert ledger.late_allocations() == 0
    memory.allocate(3 * GIB)
    assert ledger.late_allocations() == 1


def test_room_for_what_comes_later_is_looked_for() -> None:
    """The planned memory has to be free, and some for steps besides."""
    memory = FakeMemory(10 * GIB)
    ledger, _ = loaded(memory, 2)
    assert ledger.has_room(KV)
    memory.allocate(memory.use().free - ledger.plan.of(KV))
    assert not ledger.has_room(KV)


def test_late_allocations_are_counted() -> None:
    """A step within what is reserved asks the device for nothing; one beyond it is seen, and exported."""
    memory = FakeMemory(10 * GIB)
    ledger, _ = loaded(memory, 2)
    ledger.seal()
    registry = CollectorRegistry()
    export(ledger, "m", registry)
    memory.free(GIB)
    memory.allocate(GIB)
    assert ledger.late_allocations() == 0
    memory.allocate(3 * GIB)
    assert ledger.late_allocations() == 1
    text = generate_latest(registry).decode()
    assert 'moebius:gpu_memory_bytes{engine="0",model_name="m",part="dense weights"} 2.147483648e+09' in text
    assert 'moebius:gpu_memory_planned_bytes{engine="0",model_name="m",part="KV cache"}' in text
    assert 'moebius:gpu_memory_late_allocations{engine="0",model_name="m"} 1.0' in text


def test_a_cpu_has_no_ledger() -> None:
    """Its memory is the expert servers' too."""
    assert make_device_memory(torch.device("cpu")) is None


def test_profile_runs_the_largest_step(tmp_path: Path) -> None:
    """A real model, all tokens in one request, as many rows of logits as may be sampled; the peak above.

    A small step before it, in which libraries allocate what they keep, is not counted.
    """
    write_random_model(tmp_path / "model", RandomModelOptions("tiny"))
    config = read_model_config(tmp_path / "model")
    model = build_model(config)
    load_weights(model, tmp_path / "model")
    memory = FakeMemory(10 * GIB)
    memory.allocate(GIB)
    sampled: list[torch.Size] = []

    def sample(logits: torch.Tensor) -> None:
        assert torch.isfinite(logits).all()
        nbytes = 12345 if sampled else 50_000
        memory.allocate(nbytes)
        memory.free(nbytes)
        sampled.append(logits.shape)

    make_cache = partial(KVCache, config.layers, page_size=16, dtype=TORCH_DTYPES[config.dtype])
    found = profile_activations(
        model,
        lambda pages: make_cache(pages),
        lambda cache: make_attention(config.layers, cache, "cpu"),
        read_geometry(tmp_path / "model"),
        StepSize(100, 8),
        16,
        memory,
        sample,
    )
    assert found == 12345
    assert sampled == [torch.Size([1, 512]), torch.Size([8, 512])]


def test_nothing_is_profiled_without_a_device() -> None:
    """On a CPU the pool has a fixed size."""
    never = cast("Any", SimpleNamespace())
    assert profile_activations(never, never, never, None, StepSize(16, 1), 16, None) == 0
