"""Guards `moebius bench placement`: its settings, the statistics it records, and the table it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lab.bench.engine.measure import DecodeResult
from lab.bench.engine.servers import ServerCounters
from lab.bench.placement import (
    CurvePoint,
    PlacementOptions,
    check,
    parse_ratios,
    placed,
    statistics_of,
    table,
)
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.experts.placement import ExpertStatistics, make_placement
from moebius.models.geometry import MoeGeometry

GEOMETRY = MoeGeometry("qwen3_moe", 8, 2, (0, 1), 4, 2, 4, "silu", "bfloat16")


def counters(calls: int, *rows: tuple[int, ...]) -> ServerCounters:
    return ServerCounters(dict.fromkeys((0, 1), calls), {}, 0.0, dict(enumerate(rows)))


def test_recorded_counts_place_the_favourites(tmp_path: Path) -> None:
    """What the servers counted between two looks is a statistics file that `frequency` places by."""
    before, after = counters(1, (1, 0, 0, 1), (0, 1, 1, 0)), counters(11, (1, 9, 1, 11), (10, 1, 10, 3))
    path = tmp_path / "statistics.safetensors"
    path.write_bytes(statistics_of([before, before], [after, after], GEOMETRY, whole=False))
    found = ExpertStatistics.read(str(path))
    assert found.counts.tolist() == [[0, 9, 1, 10], [10, 0, 9, 3]]
    assert (found.steps, found.tokens) == (10, 10)
    config = placed(MoebiusConfig(), "frequency", 50, path)
    assert make_placement(config.placement, GEOMETRY).resident == {0: (1, 3), 1: (0, 2)}


def test_servers_with_whole_experts_add_up() -> None:
    """Each counts only its own."""
    zero = counters(0, (0, 0, 0, 0), (0, 0, 0, 0))
    parts = [counters(5, (4, 6, 0, 0), (5, 5, 0, 0)), counters(5, (0, 0, 2, 8), (0, 0, 9, 1))]
    content = statistics_of([zero, zero], parts, GEOMETRY, whole=True)
    assert np.frombuffer(content, np.uint8).size > 0
    assert b"qwen3_moe" in content


def test_every_ratio_has_its_own_settings() -> None:
    """A share for all layers replaces whatever the configuration says of the GPU's experts."""
    config = MoebiusConfig()
    own = config.model_copy(
        update={"placement": config.placement.model_copy(update={"gpu_layers": "0", "gpu_experts": 3})}
    )
    settings = placed(own, "random", 30, Path("unused")).placement
    assert (settings.gpu_layers, settings.gpu_experts, settings.gpu_experts_ratio) == ("", None, 0.3)
    assert (settings.placement_strategy, settings.expert_statistics) == ("random", "")


def test_wrong_options_are_named() -> None:
    """Strategies by name, ratios in percent."""
    with pytest.raises(UserError, match=r"--strategies: \['best'\] are not allowed; allowed: uniform"):
        check(PlacementOptions(strategies=("uniform", "best")))
    assert parse_ratios("0,100") == (0, 100)
    with pytest.raises(UserError, match="--ratios: '0,101' is not allowed; allowed: percentages"):
        parse_ratios("0,101")
    check(PlacementOptions())


def test_table_has_a_row_per_ratio() -> None:
    """Markdown with every number of streams in its cell."""
    decode = cast("Any", SimpleNamespace)
    options = PlacementOptions(strategies=("uniform", "random"), ratios=(0, 50))
    options = replace(options, engine=replace(options.engine, streams=(1, 4)))
    points = [
        CurvePoint(name, ratio, cast("DecodeResult", decode(streams=streams, tokens_per_second=base + ratio)))
        for name, base in (("uniform", 10.0), ("random", 20.0))
        for ratio in (0, 50)
        for streams in (1, 4)
    ]
    lines = table(points, options).splitlines()
    assert lines[0] == "| experts on the GPU | uniform | random |"
    assert lines[2:] == ["| 0 % | 10.0 / 10.0 | 20.0 / 20.0 |", "| 50 % | 60.0 / 60.0 | 70.0 / 70.0 |"]
