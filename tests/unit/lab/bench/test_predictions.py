"""Guards `moebius bench plan`: what it tries and compares, and that one refusal ends nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from lab.bench.engine.run import EngineBenchOptions
from lab.bench.predictions import Compared, PredictionOptions, cases, compared, run_cases, verdict
from moebius.config import MoebiusConfig
from moebius.errors import UserError

if TYPE_CHECKING:
    from app.planning.capacity import CapacityPlan
    from lab.bench.engine.run import EngineBench


def options(**changes: object) -> PredictionOptions:
    found: dict[str, object] = {
        "models": ("one", "two"),
        "devices": ("cpu", "cuda"),
        "ratios": (0, 100),
        "engine": EngineBenchOptions((1, 8)),
        "repeats": 2,
        "fetch": "off",
    }
    return PredictionOptions(**(found | changes))  # type: ignore[arg-type]


def test_a_configuration_for_each_model_device_and_share() -> None:
    """A CPU holds no residents: it has one configuration for all shares."""
    found = cases(MoebiusConfig(), options())
    of_one = ["one, cpu", "one, cuda, 0 % of the experts on GPUs", "one, cuda, 100 % of the experts on GPUs"]
    assert [case.name for case in found] == [*of_one, *(name.replace("one", "two") for name in of_one)]
    assert [case.config.placement.gpu_experts_ratio for case in found[:3]] == [None, 0.0, 1.0]
    assert {case.config.gpu.fetch_experts for case in found} == {"off"}
    as_served = cases(MoebiusConfig(), options(ratios=(), devices=("auto",), models=("one",)))
    assert [case.config.placement.gpu_experts_ratio for case in as_served] == [None]


def speed(rows: int, tokens_per_second: float) -> SimpleNamespace:
    return SimpleNamespace(
        rows=rows, tokens_per_second=tokens_per_second, seconds=SimpleNamespace(bound_by="experts in RAM")
    )


def test_the_fastest_measurement_is_compared() -> None:
    """Each number of streams with its own prediction, each prompt with the plan of its length."""
    decode = SimpleNamespace(
        decode=(speed(1, 110.0), speed(8, 300.0)), prefill=None, expert_kernels="measured on this host"
    )
    prompt = SimpleNamespace(decode=(), prefill=speed(512, 900.0), expert_kernels="")
    measured = SimpleNamespace(
        decode=[
            SimpleNamespace(streams=streams, tokens_per_second=found)
            for streams, found in ((1, 90.0), (1, 100.0), (8, 400.0), (8, 200.0))
        ],
        prefill=[SimpleNamespace(prompt_len=512, tokens_per_second=1000.0)],
    )
    plans = cast("dict[int, CapacityPlan]", {0: decode, 512: prompt})
    rows = compared("a case", plans, cast("EngineBench", measured))
    assert [(row.figure, row.predicted, row.measured) for row in rows] == [
        ("decode 1", 110.0, 100.0),
        ("decode 8", 300.0, 400.0),
        ("prefill 512", 900.0, 1000.0),
    ]
    assert [row.ratio for row in rows] == pytest.approx([1.1, 0.75, 0.9])
    assert verdict(rows).startswith("2 of 3 figures are predicted within 15%")
    assert "worst 0.75 (decode 8 of a case)" in verdict(rows)


def test_promises_and_understatements_count_alike() -> None:
    """Half as fast and twice as fast as predicted are equally wrong; the sign decides nothing."""
    rows = [Compared("c", name, value, 100.0, "", "") for name, value in (("a", 130.0), ("b", 60.0))]
    assert "worst 0.60 (b of c)" in verdict(rows)


def test_every_refusal_is_named_before_the_command_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A configuration that is refused does not keep the others from being tried."""
    missing = tuple(str(tmp_path / name) for name in ("first", "second"))
    with pytest.raises(UserError, match="no configuration could be measured"):
        run_cases(MoebiusConfig(), options(models=missing, devices=("cpu",)), None)
    out = capfd.readouterr().out
    assert out.count("refused:") == 2
    assert all(f"{name}, cpu" in out for name in missing)
