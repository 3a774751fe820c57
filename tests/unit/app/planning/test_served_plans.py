"""Invariant: no plan that `serve` refuses. What `plan` prints is read by the real command line, on machines
that are only numbers, and decided by the functions that supervisor and engines decide with.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.gpu_models import GPU_MODELS, GpuModel, least_of
from app.planning.gpu_use import plan_capacity
from app.planning.hardware import Hardware
from app.planning.report import quiet, serve_command
from app.planning.smallest_change import smaller_quantisation, smallest_change
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from tests.helpers.drawn_machines import Machine, install, serve
from tests.helpers.plan_models import GIB, published_once, settings
from tests.helpers.published_checkpoints import FIXTURES

NAMES = sorted(path.stem for path in FIXTURES.glob("*.json"))
EACH, DRAWS = 10, 500  # Draws of one test, and of all.
Directory = Callable[[str], Path]
# Settings that are given now and then, and how often.
GIVEN: dict[str, tuple[float, tuple[Any, ...]]] = {
    "expert_dtype": (0.6, ("int4", "int8", "bfloat16")),
    "max_num_seqs": (0.3, (1, 4, 32, 128)),
    "kv_cache_dtype": (0.2, ("fp8_e4m3",)),
    "max_model_len": (0.2, (4096, 32768)),
    "max_num_batched_tokens": (0.2, (256, 2048, 8192)),
    "dense_weights": (0.3, ("keep", "dequantise")),
    "speculative_method": (0.3, ("ngram", "mtp", "auto")),
    "pipeline_parallel_size": (0.15, (2,)),
    "gpu_experts": (0.1, (1, 4)),
    "gpu_memory_utilization": (0.2, (0.8, 0.95)),
    "kv_cache_gib": (0.1, (0.5, 2, 8)),
    "prefill_experts": (0.1, ("cpu", "stream")),
}
WISHES = (Wish(), Wish(), Wish(4096, 4), Wish(32768, 1), Wish(None, 16))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """Returns a published model's headers; each is written once."""
    return published_once(tmp_path_factory)


@dataclass(frozen=True)
class Case:
    """A model on a machine; filled by `draw` and by hand."""

    config: MoebiusConfig
    host: Hardware
    wish: Wish

    @property
    def machine(self) -> Machine:
        """The same host, as a driver and the kernel describe it."""
        gpus = self.host.rank_gpus(self.host.gpus) if self.host.gpu is not None else ()
        sizes, names = tuple(gpu.memory_bytes for gpu in gpus), tuple(gpu.name for gpu in gpus)
        each = self.host.cores // self.host.sockets
        return Machine(sizes, self.host.ram_bytes, self.host.sockets, each, names)

    def plan(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> CapacityPlan:
        """Raises DoesNotFit, or another error for settings that the model or machine cannot have."""
        install(monkeypatch, self.machine, directory)
        with quiet():
            # What would fit instead takes most of the time, and is the other tests' concern.
            return plan_capacity(self.config, self.host, self.wish, fill=True, explain=False)

    def serve(self, monkeypatch: pytest.MonkeyPatch, directory: Path, command: str) -> list[MoebiusConfig]:
        with quiet():
            return serve(monkeypatch, self.machine, directory, shlex.split(command))


def host_of(gpus: int, gpu: GpuModel | None, ram_gib: float, nodes: int, cores: int) -> Hardware:
    """Returns a host of nodes with `cores` cores each."""
    numbers = gpus, gpu, int(ram_gib * GIB), nodes, nodes * cores, nodes * 100e9, 10e12, "amx"
    return Hardware(*numbers, origin={"cores": "detected"})


def draw(seed: int, directory: Directory) -> Case:
    """Returns any published model, on any GPUs of the table, also of two kinds, or none, and 16 GiB to 1.5
    TiB of RAM.
    """
    chosen = random.Random(seed)
    gpu = chosen.choice([None, *GPU_MODELS.values(), *GPU_MODELS.values()])
    count = chosen.choice([1, 1, 1, 2, 4, 8]) if gpu else 0
    if gpu is not None and chosen.random() < 0.3:
        gpu = least_of([gpu, chosen.choice(list(GPU_MODELS.values()))])
        count = 2
    host = host_of(
        count,
        gpu,
        2 ** chosen.uniform(4, 10.6),
        chosen.choice([1, 1, 2, 4]),
        chosen.choice([4, 8, 16, 32, 64]),
    )
    given = {
        name: chosen.choice(values) for name, (often, values) in GIVEN.items() if chosen.random() < often
    }
    name, wish = chosen.choice(NAMES), chosen.choice(WISHES)
    flags = {name: str(value) for name, value in given.items()}
    return Case(settings(directory(name), language_model_only="true", **flags), host, wish)


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(EACH, DRAWS, EACH))],
)
def test_what_is_planned_is_served(
    first: int, directory: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """500 draws: no process refuses what was planned, and engines choose no more outputs than planned, and
    hold dense weights in its form.
    """
    served = 0
    # Of ten draws it may be that none fits: some others follow until one does.
    for seed in (*range(first, first + EACH), *range(first + DRAWS, first + 9 * DRAWS, DRAWS)):
        if served and seed >= first + EACH:
            break
        case = draw(seed, directory)
        try:
            plan = case.plan(monkeypatch, tmp_path / f"{seed}")
        except (UserError, ValueError):  # it does not fit, or is a setting that the model cannot have
            continue
        command = serve_command(case.config, plan)
        try:
            engines = case.serve(monkeypatch, tmp_path / f"{seed}", command)
        except (UserError, ValueError) as error:
            pytest.fail(f"draw {seed}: {command}: {error}")
        numbers = {engine.gpu.num_seqs for engine in engines}
        planned = int(plan.settings["max_num_seqs"])
        # Without the number in its settings an engine decides beside the experts, and may choose fewer.
        assert max(numbers) <= planned, f"draw {seed}: {command}"
        assert plan.max_num_seqs is None or numbers == {planned}, f"draw {seed}: {command}"
        if plan.dense is not None:
            assert {engine.model.dense_weights for engine in engines} == {plan.dense.setting}
        # Without a wish serve asks the same question by itself, and no process refuses its answer.
        if plan.dense is not None and not case.wish.is_demanded:
            words = [*shlex.split(command), "--dense-weights", "auto"]
            case.serve(monkeypatch, tmp_path / f"{seed}", shlex.join(words))
        served += 1
    assert served, "nothing was planned"


def test_streaming_is_asked_for_where_everything_is_resident(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then nothing is left to stream, and no server is started whose weights could be: that is no error."""
    config = settings(directory("olmoe-1b-7b"), prefill_experts="stream")
    case = Case(config, host_of(1, GPU_MODELS["RTX 4090"], 64, 1, 16), Wish())
    plan = case.plan(monkeypatch, tmp_path)
    assert plan.residency.is_everything
    assert case.serve(monkeypatch, tmp_path, serve_command(case.config, plan))


TOO_SMALL = {
    "states of too many outputs": ("qwen3-next-80b-a3b", {"max_num_seqs": "128"}, "RTX 4090", 256),
    "experts in too many bits": ("qwen3-30b-a3b", {}, "RTX 4090", 32),
    "a cache that is too large": ("gpt-oss-20b", {"kv_cache_gib": "20"}, "RTX 4090", 64),
}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_what_a_refusal_proposes_is_served(
    name: str, directory: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A refusal ends with a whole command line, and that one is served."""
    model, flags, gpu, ram_gib = TOO_SMALL[name]
    case = Case(settings(directory(model), **flags), host_of(1, GPU_MODELS[gpu], ram_gib, 1, 16), Wish())
    with pytest.raises(DoesNotFit):
        case.plan(monkeypatch, tmp_path)
    change = smallest_change(case.config, case.host, case.wish, fill=True)
    assert change is not None
    assert len(change.settings) == 1
    case.serve(monkeypatch, tmp_path, serve_command(change.applied(case.config), change.plan))


def test_a_smaller_quantisation_is_named(directory: Directory) -> None:
    """Where not even int4 fits, the type of GGUF that does is named; where none does, none."""
    config, gpu = settings(directory("qwen3-235b-a22b")), GPU_MODELS["RTX 4090"]
    found = {
        ram: smaller_quantisation(config, host_of(1, gpu, ram, 1, 16), Wish(), fill=True)
        for ram in (110, 85, 40)
    }
    assert found == {110: "Q3_K", 85: "Q2_K", 40: ""}
    assert smallest_change(config, host_of(1, gpu, 110, 1, 16), Wish(), fill=True) is None
