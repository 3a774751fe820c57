"""Guards what `dense_weights: auto` becomes on GPUs: one decision, by memory, for plan, serve and engines."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.chart_values import chart_values
from app.planning.gpu_models import GPU_MODELS
from app.planning.gpu_use import plan_capacity
from app.planning.hardware import Hardware
from app.planning.planner import Planner
from app.planning.report import quiet, serve_command, summary
from gpu_service.assembly import build
from gpu_service.assembly.experts import rank_moe
from gpu_service.core.parallel import ParallelContext
from moebius.config import MoebiusConfig
from moebius.models.served import read_served_model
from tests.helpers.drawn_machines import Machine, Numbers, Rank, install, serve
from tests.helpers.plan_models import GIB, published_once, settings

Directory = Callable[[str], Path]
# Published in fp8, whole or in part, and where their dense layers matter: the sizes of a card, GiB, on which
# both decisions occur.
QUANTISED = {"qwen3-30b-a3b-fp8": (16, 80), "minimax-m2": (24, 768), "deepseek-v3": (24, 1536)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """Returns a published model's headers; each is written once."""
    return published_once(tmp_path_factory)


def host(gib: float, gpus: int = 1) -> Hardware:
    """Returns a host with cards of this number of GiB and RAM for any model."""
    card = replace(GPU_MODELS["RTX 4090"], memory_bytes=int(gib * GIB))
    numbers = gpus, card, 2048 * GIB, 1, 32, 400e9, 10e12, "amx"
    return Hardware(*numbers, origin={"cores": "detected"})


def plan(config: MoebiusConfig, gib: float, gpus: int = 1, wish: Wish | None = None) -> CapacityPlan:
    with quiet():
        return plan_capacity(config, host(gib, gpus), wish or Wish(), fill=True, explain=False)


def holds_everything(config: MoebiusConfig, gib: float, gpus: int = 1) -> bool:
    """Returns whether a plan of these settings has all experts on GPUs, and four requests of 8192 tokens."""
    try:
        found = plan(config, gib, gpus)
    except DoesNotFit:
        return False
    return found.residency.is_everything and found.kv.tokens >= 4 * 8192


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("name", QUANTISED)
def test_weights_are_kept_where_not_all_fits_beside_dequantised_ones(
    name: str, gpus: int, directory: Directory
) -> None:
    """The plan is that of the form which is chosen, and names it; the other one is not looked at again."""
    found = []
    for gib in QUANTISED[name]:
        config = settings(directory(name))
        made = plan(config, gib, gpus)
        assert made.dense is not None
        assert made.dense.stored_bytes < made.dense.dequantised_bytes
        fits = holds_everything(settings(directory(name), dense_weights="dequantise"), gib, gpus)
        assert made.dense.setting == ("dequantise" if fits else "keep")
        same = plan(settings(directory(name), dense_weights=made.dense.setting), gib, gpus)
        assert (made.components, made.residency, made.kv) == (same.components, same.residency, same.kv)
        assert same.dense is None, "what is set is not decided"
        assert f"--dense-weights {made.dense.setting}" in serve_command(config, made)
        lines = [line for line in summary(made) if line.startswith("dense weights:")]
        assert len(lines) == 1
        assert f"{made.dense.stored_bytes / GIB:.2f} GiB" in lines[0]
        assert "dense_weights auto" in lines[0]
        found.append(made.dense.setting)
    assert found == ["keep", "dequantise"]


def test_nothing_is_decided_where_nothing_is_quantised(directory: Directory) -> None:
    """Both forms of dense layers in 16 bits are the same, and no option says one."""
    for gib in (24, 96):
        made = plan(settings(directory("gpt-oss-120b")), gib)
        assert made.dense is None
        assert "--dense-weights" not in serve_command(settings(directory("gpt-oss-120b")), made)
        assert made.settings["dense weights"] == "bfloat16"


def test_a_cpu_keeps_weights_whatever_the_memory(directory: Directory) -> None:
    """There `auto` is `keep`, and no plan decides it."""
    config = settings(directory("qwen3-30b-a3b-fp8"), device="cpu")
    made = plan(config, 24)
    kept = plan(settings(directory("qwen3-30b-a3b-fp8"), device="cpu", dense_weights="keep"), 24)
    assert made.dense is None
    assert made.components == kept.components


def test_a_wished_cache_counts(directory: Directory) -> None:
    """A longer context than fits beside dequantised weights is a reason to keep them."""
    gib, name = 42, "qwen3-30b-a3b-fp8"
    room = plan(settings(directory(name), dense_weights="dequantise"), gib).kv.tokens // 4
    for tokens, chosen in ((room, "dequantise"), (room + 512, "keep")):
        made = plan(settings(directory(name)), gib, wish=Wish(tokens, 4))
        assert made.kv.tokens >= 4 * tokens
        assert made.dense is not None
        assert made.dense.setting == chosen


def test_experts_that_settings_place_count_instead_of_all(directory: Directory) -> None:
    """Beside a few experts there is room for dequantised weights on a card that does not hold all."""
    name = "qwen3-30b-a3b-fp8"
    for experts, chosen in ((1, "dequantise"), (128, "dequantise")):
        made = plan(settings(directory(name), gpu_experts=experts), 48)
        assert made.dense is not None
        assert made.dense.setting == chosen
    few = plan(settings(directory(name), gpu_experts=1), 24)
    assert few.dense is not None
    assert few.dense.setting == "dequantise"
    all_but = plan(settings(directory(name)), 24)
    assert all_but.dense is not None
    assert all_but.dense.setting == "keep"


CASES: dict[str, tuple[str, float, int, dict[str, Any]]] = {
    "short": ("qwen3-30b-a3b-fp8", 16, 1, {}),
    "ample": ("qwen3-30b-a3b-fp8", 80, 1, {}),
    "two short ones": ("minimax-m2", 24, 2, {}),
    "stages": ("minimax-m2", 24, 2, {"pipeline_parallel_size": 2}),
    "placed": ("qwen3-30b-a3b-fp8", 24, 1, {"gpu_experts": 1, "drop_resident": "keep"}),
    "placed, and too many": ("minimax-m2", 24, 1, {"gpu_experts": 4, "drop_resident": "keep"}),
}


@pytest.mark.parametrize("case", CASES)
def test_serve_decides_as_the_plan(
    case: str, directory: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the option that the plan's command has, the supervisor gives all engines the same form."""
    name, gib, gpus, flags = CASES[case]
    config = settings(directory(name), **flags)
    parallel = {"tensor_parallel_size": gpus} if gpus > 1 and "pipeline_parallel_size" not in flags else {}
    made = plan(settings(directory(name), **flags, **parallel), gib, gpus)
    assert made.dense is not None
    machine = Machine((int(gib * GIB),) * gpus, 2048 * GIB, 1, 32, ("RTX 4090",) * gpus)
    words = shlex.split(serve_command(config, made))
    at = words.index("--dense-weights")
    assert words[at + 1] == made.dense.setting
    asked = shlex.split(
        serve_command(settings(directory(name), **flags, **parallel), replace(made, dense=None))
    )
    if not flags.get("gpu_experts"):  # what the plan places is not given to serve, either
        asked = _without(asked, "--gpu-experts")
    with quiet():
        for command in (words, asked):
            engines = serve(monkeypatch, machine, tmp_path / "served", command)
            assert {engine.model.dense_weights for engine in engines} == {made.dense.setting}, command


def _without(words: list[str], option: str) -> list[str]:
    return words if option not in words else [*words[: (at := words.index(option))], *words[at + 2 :]]


def decided_by_engine(config: MoebiusConfig, rank: int, numbers: Numbers) -> str:
    """Returns `dense_weights` as a rank has it when it has planned its memory."""
    parallel = ParallelContext.place(config.parallel, rank)
    model_config, group = read_served_model(config), Rank(parallel, numbers)
    model = build._shaped_model(config, model_config, torch.device("meta"), group)
    model.device = torch.device("cuda", rank)
    _, chosen, _ = build._plan_memory(config, model, rank_moe(config, model_config, group), group)
    return chosen.model.dense_weights


@pytest.mark.parametrize("case", ["placed", "placed, and too many", "short", "ample"])
def test_an_engine_by_itself_decides_as_the_plan(
    case: str, directory: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the plan's placement in its settings, on a device of that size, but without the form."""
    name, gib, gpus, flags = CASES[case]
    flags = flags | {"prefill_experts": "cpu"}  # no server of this host has experts to stream
    made = plan(settings(directory(name), **flags), gib, gpus)
    assert made.dense is not None
    placed = {"gpu_experts": max(made.residency.by_layer.values())}
    placed["gpu_experts"] += made.dense.setting == "keep" and made.residency.is_filled
    config = settings(directory(name), **flags | placed)
    install(monkeypatch, Machine((int(gib * GIB),), 2048 * GIB, 1, 32), tmp_path)
    asked = Planner(config, on_gpu=True).plan(host(gib), Wish(), fill=False, explain=False).dense
    assert asked is not None
    assert decided_by_engine(config, 0, Numbers(1)) == asked.setting


def test_ranks_by_themselves_decide_alike(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One whose GPU has less memory decides for all."""
    sizes = (80 * GIB, 80 * GIB), (80 * GIB, 21 * GIB)
    flags = {"tensor_parallel_size": 2, "gpu_experts": 128, "prefill_experts": "cpu"}
    for memory, chosen in zip(sizes, ("dequantise", "keep"), strict=True):
        install(monkeypatch, Machine(memory, 2048 * GIB, 1, 32), tmp_path)
        numbers = Numbers(2)
        with ThreadPoolExecutor(2) as pool:
            ranks = [
                pool.submit(
                    decided_by_engine, settings(directory("qwen3-30b-a3b-fp8"), **flags), rank, numbers
                )
                for rank in (0, 1)
            ]
        assert [rank.result() for rank in ranks] == [chosen, chosen]


def test_the_chart_is_given_what_was_decided(directory: Directory) -> None:
    """Its engine runs by itself, and is to hold what was planned."""
    config = settings(directory("minimax-m2"))
    made = plan(config, 24)
    assert made.dense is not None
    assert chart_values(config, made)["config"]["model"]["dense_weights"] == made.dense.setting
    unquantised = settings(directory("gpt-oss-120b"))
    assert "model" not in chart_values(unquantised, plan(unquantised, 24)).get("config", {})
