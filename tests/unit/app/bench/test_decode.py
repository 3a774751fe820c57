"""Guards `moebius bench decode`: its arithmetic, its limit and its JSON rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from app.bench.bounds import WeightBytes
from app.bench.decode import StreamTimes, quantile, run
from app.bench.limits import read_bandwidth
from moebius.errors import UserError
from tests.helpers.sse_server import scripted_server, text_event, usage_event


def test_bytes_per_step() -> None:
    """Dense weights once, experts by the expected share that at least one row chose."""
    weights = WeightBytes(dense=100, routed=1600, num_experts=16, top_k=4)
    assert weights.per_step(1) == pytest.approx(100 + 400)
    assert weights.per_step(2) == pytest.approx(100 + 1600 * (1 - 0.75**2))
    assert weights.per_step(10_000) == pytest.approx(1700)


def test_inter_token_latency_leaves_out_the_first() -> None:
    """Five tokens between 1 s and 3 s are 0.5 s apart."""
    assert StreamTimes(1.0, 3.0, 5, 0.2).inter_token == pytest.approx(0.5)


def test_quantiles() -> None:
    """Medians and 95th percentiles, also of one value."""
    assert quantile([4.0], 0.95) == 4.0
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([float(value) for value in range(101)], 0.95) == pytest.approx(95.0)


def test_bandwidth_is_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe divides all it says it reads by the seconds of the best pass, with one thread and several."""
    ticks = itertools.accumulate(itertools.cycle([1.0, 4.0, 1.0, 2.0, 1.0, 3.0]))
    monkeypatch.setattr("app.bench.limits.time.perf_counter", lambda: next(ticks))
    for threads in (1, 4):
        assert read_bandwidth(total_bytes=2**22, threads=threads) == 2**22 / 2.0


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per number of streams, with the server's token counts; the limit is unknown without weights."""
    target = tmp_path / "rows.json"
    with scripted_server([text_event("a"), text_event("b"), usage_event(10)]) as server:
        run(server.url, "", "", [1, 3], 10, None, target)
    rows = json.loads(target.read_text())
    assert [(row["streams"], row["tokens"]) for row in rows] == [(1, 10), (3, 30)]
    assert all(row["limit_tokens_per_second"] is None for row in rows)
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert capsys.readouterr().out.count("unknown") == 2
    prompts = {request["prompt"] for request in server.requests}
    assert len(prompts) == 3


def test_unwritable_json_is_named(tmp_path: Path) -> None:
    """A target that cannot be written is an error of the user."""
    with (
        scripted_server([text_event("a"), usage_event(2)]) as server,
        pytest.raises(UserError, match=r"--json .*rows\.json"),
    ):
        run(server.url, "m", "", [1], 2, None, tmp_path / "missing" / "rows.json")
