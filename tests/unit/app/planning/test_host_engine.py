"""Guards predictions of an engine on a CPU: by measured times of its products, or by shares of peaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.planning.gpu_use import make_planner
from app.planning.host_engine import (
    AMONG_OTHERS,
    ATTENTION_SHARE,
    BANDWIDTH_SHARE,
    CALLED_LAYER_SECONDS,
    LAYER_SECONDS,
    PEAK_SHARE,
    SAMPLED_SECONDS,
    STEP_SECONDS,
    HostEngine,
    attention_seconds,
    call_seconds,
    host_engine,
    measured_products,
    product_seconds,
)
from moebius.host.kernel_times import MeasuredOn, PanelTimes
from tests.helpers.demo import demo_checkpoint
from tests.helpers.plan_models import hardware, settings
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model

HOST = replace(
    hardware("none", sockets=1, cores=4, bandwidth=40e9, cpu_flops=400e9, isa="avx512"), gpus=0, gpu=None
)
ON = MeasuredOn("cpu", 3, "avx512", "b")
TIMES = PanelTimes(ON, "bfloat16", "bfloat16", 512, ((1, 300.0), (16, 900.0), (64, 3000.0)))
ENGINE = HostEngine(3, 512, 1.0, True, {"bfloat16": TIMES})
# 10 panels of layers and 4 of the head; routers and norms are values.
ELEMENTS = {"bfloat16": 10 * 16 * 512, "": 512}, {"bfloat16": 4 * 16 * 512}


def test_products_take_their_measured_panels() -> None:
    """A row passes the layers and, where a token is sampled, the head; many rows take longer among others."""
    assert product_seconds(ENGINE, HOST, ELEMENTS, 0, 1, 1) == pytest.approx(14 * 300e-9)
    prompt = product_seconds(ENGINE, HOST, ELEMENTS, 0, 64, 1)
    assert prompt == pytest.approx(AMONG_OTHERS * 10 * 3000e-9 + 4 * 300e-9)


def test_products_that_were_not_measured() -> None:
    """Bandwidth bounds few rows, the peak of the engine's threads many."""
    assumed = replace(ENGINE, products={})
    elements, nbytes = {"bfloat16": 10**9}, 2 * 10**9
    few = product_seconds(assumed, HOST, (elements, {}), nbytes, 1, 1)
    assert few == pytest.approx(2e9 / (40e9 * BANDWIDTH_SHARE))
    many = product_seconds(assumed, HOST, (elements, {}), nbytes, 1000, 1)
    assert many == pytest.approx(2e12 / (400e9 * 3 / 4 * PEAK_SHARE))


def test_attention_uses_no_tiles() -> None:
    """An AMX host's peak is not that of its attention; reading the cache takes bandwidth."""
    assert attention_seconds(ENGINE, HOST, 28e9, 0) == pytest.approx(1.0)
    amx = replace(HOST, isa="amx", cpu_flops=11.6e12)
    assert attention_seconds(ENGINE, amx, 0, 480e9) == pytest.approx(480e9 / (3 * 320e9 * ATTENTION_SHARE))


def test_few_rows_take_one_call() -> None:
    """Up to 16 rows layers are computed by one call, where they are of the common kind, else one by one."""
    step = STEP_SECONDS + SAMPLED_SECONDS
    assert call_seconds(ENGINE, 10, 16, 1) == pytest.approx(step + 10 * LAYER_SECONDS)
    assert call_seconds(ENGINE, 10, 17, 1) == pytest.approx(step + 10 * CALLED_LAYER_SECONDS)
    half = replace(ENGINE, layers_in_one_call=0.5)
    mixed = 5 * (LAYER_SECONDS + CALLED_LAYER_SECONDS)
    assert call_seconds(half, 10, 1, 1) == pytest.approx(step + mixed)


def test_every_format_of_the_demo_is_timed() -> None:
    """What is measured covers all that the plan multiplies, so that the plan counts with it."""
    config = settings(Path(demo_checkpoint()), device="cpu", gpu_threads=1)
    planner = make_planner(config, HOST, fill=False)
    ranks = planner.forecast.ranks
    held = sum(ranks[0].layer_elements.values()) + sum(ranks[0].head_elements.values())
    assert held == ranks[0].read_elements
    assert ranks[0].head_elements == {"bfloat16": 49152 * 576}
    found = measured_products(config, planner.model, ranks, HOST)
    assert [times.weight_format for times in found] == ["bfloat16"]
    assert all(nanoseconds > 0 for _, nanoseconds in found[0].points)
    measured = host_engine(config, planner.model, ranks, replace(HOST, kernel_times=found))
    assert set(measured.products) == {"bfloat16"}
    assert measured.layers_in_one_call == 1.0
    assert host_engine(config, planner.model, ranks, HOST).products == {}


@pytest.mark.parametrize(
    ("name", "share"), [("kimi_linear", 1.0), ("lfm2_moe", 1.0), ("jamba", 1.0), ("minimax", 1.0)]
)
def test_layers_with_states_are_in_the_call(name: str, share: float, tmp_path: Path) -> None:
    """All of these layers are, as `tests/equality/test_host_layers.py` finds."""
    write_tiny_model(TINY_MODELS[name], tmp_path, seed=1)
    config = settings(tmp_path, device="cpu", gpu_threads=1)
    planner = make_planner(config, HOST, fill=False)
    found = host_engine(config, planner.model, planner.forecast.ranks, HOST)
    assert found.layers_in_one_call == share


@pytest.mark.parametrize(("threads", "woken"), [(0, True), (4, True), (3, False)])
def test_servers_wait_awake_where_they_have_cores(threads: int, woken: bool) -> None:
    """Unset, they compute on all cores, and the engine has to wake them in each layer."""
    config = settings(Path(demo_checkpoint()), device="cpu", expert_threads=threads)
    planner = make_planner(config, HOST, fill=False)
    assert host_engine(config, planner.model, planner.forecast.ranks, HOST).wakes_servers == woken
