"""Guards `moebius bench kernels`: what it reads from its options, whom rows choose, and that a ratio is the
larger of the two limits, measured in the same run, over the time."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from app.bench import limits
from app.bench.limits import BandwidthLimit, PeakLimit, ReadPattern
from app.cli import app
from app.cli_options import parse_counts
from lab.bench import kernels, kernels_inputs
from lab.bench.kernels import TABLE, KernelsOptions, Measured, compare
from lab.bench.kernels_inputs import (
    SHAPES,
    ExpertShape,
    WorkingSet,
    parse_shape,
    parse_shapes,
    plan_working_set,
)
from lab.bench.kernels_measure import (
    EngineSetting,
    Times,
    calls_of,
    choose_cpus,
    kernel_names,
    measure,
    measure_pairs,
)
from moebius.errors import UserError

TINY = ExpertShape("64x32x4x2", 64, 32, 4, 2)
MIB = 1 << 20


def test_shapes_by_name_and_by_size() -> None:
    assert parse_shape("deepseek-v3") == ExpertShape("deepseek-v3", 7168, 2048, 256, 8)
    assert parse_shape("64x32x4x2") == TINY
    assert parse_shapes("qwen3-30b-a3b,64x32x4x2") == [SHAPES["qwen3-30b-a3b"], TINY]
    assert [shape.name for shape in parse_shapes("all")] == list(SHAPES)


@pytest.mark.parametrize(
    "text", ["", "qwen", "64x32x4", "64x32x4x0", "-64x32x4x2", "64x32x4x2x1", "64 x32x4x2"]
)
def test_unknown_shape_names_the_known_ones(text: str) -> None:
    with pytest.raises(UserError, match=r"--shape: .* allowed: qwen3-30b-a3b, .*HxIxExK"):
        parse_shape(text)


def test_more_experts_per_row_than_experts() -> None:
    with pytest.raises(UserError, match="'64x32x4x5' has 5 experts per row of 4"):
        parse_shape("64x32x4x5")


def test_counts() -> None:
    assert parse_counts("1,16,4096", "--rows") == [1, 16, 4096]
    for text in ("", "0", "1,", "1,x", "-1", "1.5"):
        with pytest.raises(UserError, match=r"--rows: .* allowed: numbers from 1"):
            parse_counts(text, "--rows")
    with pytest.raises(UserError, match="--servers: '17' is not allowed; allowed: numbers from 1 to 16"):
        parse_counts("17", "--servers", 16)


def test_operations_are_two_per_weight_and_pair() -> None:
    """Gate, up and down have hidden x intermediate weights each."""
    assert TINY.operations(5) == 5 * 3 * 64 * 32 * 2


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 4, 2), (50, 16, 8), (7, 3, 3)])
def test_uniform_routing_chooses_distinct_experts(rows: int, experts: int, top_k: int) -> None:
    routing = kernels_inputs.uniform(rows, experts, top_k, np.random.default_rng(1))
    assert routing.topk_ids.shape == routing.topk_weights.shape == (rows, top_k)
    assert (routing.topk_ids.dtype, routing.topk_weights.dtype) == (np.int32, np.float32)
    assert all(len(set(row)) == top_k for row in routing.topk_ids)
    assert routing.distinct_experts == len(np.unique(routing.topk_ids))
    assert routing.pairs == rows * top_k
    np.testing.assert_allclose(routing.topk_weights.sum(axis=1), 1, rtol=1e-5)


def test_uniform_routing_is_uniform() -> None:
    """4000 rows of 4 out of 16: each expert about 1000 times (standard deviation 27)."""
    routing = kernels_inputs.uniform(4000, 16, 4, np.random.default_rng(2))
    counts = np.bincount(routing.topk_ids.ravel(), minlength=16)
    assert abs(counts - 1000).max() < 5 * 28


@pytest.mark.parametrize(("count", "experts", "top_k"), [(64, 16, 8), (3, 5, 2), (1, 4, 4), (7, 7, 3)])
def test_exact_routing_gives_every_expert_the_same(count: int, experts: int, top_k: int) -> None:
    """Exactly `count` rows each, never one expert twice in a row."""
    routing = kernels_inputs.exact(count, experts, top_k, np.random.default_rng(3))
    chosen = routing.topk_ids[routing.topk_ids >= 0]
    assert np.bincount(chosen, minlength=experts).tolist() == [count] * experts
    for row in routing.topk_ids:
        held = row[row >= 0].tolist()
        assert len(set(held)) == len(held)
    assert (routing.distinct_experts, routing.pairs) == (experts, count * experts)
    assert routing.rows == -(-count * experts // top_k)


def test_working_set_is_beyond_the_cache() -> None:
    """Layers until the cache is at most a sixteenth; all experts of the model where they fit."""
    shape = ExpertShape("some", 64, 32, 16, 2)
    held = plan_working_set(shape, MIB, cache_bytes=10 * MIB, memory_bytes=1000 * MIB)
    assert (held.num_experts, held.num_layers, held.nbytes) == (16, 10, 160 * MIB)
    assert held.cached_share == pytest.approx(1 / 16)
    assert held.note == ""


def test_working_set_reduces_experts_and_says_so() -> None:
    """What does not fit is left out, down to twice the experts of a row; cached weights are admitted."""
    shape = ExpertShape("some", 64, 32, 256, 8)
    held = plan_working_set(shape, MIB, cache_bytes=10 * MIB, memory_bytes=32 * MIB)
    assert (held.num_experts, held.num_layers) == (32, 1)
    assert held.note == "32 of 256 experts, up to 31% of the weights may come from the cache"
    with pytest.raises(
        UserError, match=r"--memory: some needs 0\.02 GiB for 16 experts .* 0\.01 GiB are allowed"
    ):
        plan_working_set(shape, MIB, cache_bytes=MIB, memory_bytes=15 * MIB)


def test_working_set_asked_for() -> None:
    shape = ExpertShape("some", 64, 32, 256, 8)
    held = plan_working_set(shape, MIB, MIB, 100 * MIB, experts=32, layers=3)
    assert (held.num_experts, held.num_layers, held.note) == (32, 3, "32 of 256 experts")
    with pytest.raises(UserError, match="--memory: some needs"):
        plan_working_set(shape, MIB, MIB, 100 * MIB, experts=32, layers=4)
    with pytest.raises(UserError, match="--experts: 7 is not allowed for some; allowed: 8 to 256"):
        plan_working_set(shape, MIB, MIB, 100 * MIB, experts=7)
    with pytest.raises(UserError, match="--experts: 257 is not allowed"):
        plan_working_set(shape, MIB, MIB, 1000 * MIB, experts=257)


def test_every_promised_pattern_is_tried() -> None:
    """Contiguous slices and 16, 64, 256 KiB blocks, four distances, three hints, both page sizes."""
    big = limits.patterns(huge_pages=True)
    orders, distances, hints = (0, 16384, 65536, 262144), (1024, 2048, 4096), ("t0", "t1", "nta")
    assert {(p.block_bytes, p.prefetch_bytes, p.hint) for p in big if p.prefetch_bytes} == set(
        itertools.product(orders, distances, hints)
    )
    assert {p.block_bytes for p in big if not p.prefetch_bytes} == set(orders)
    small = limits.patterns(huge_pages=False)
    assert {p.block_bytes for p in small} == set(orders)
    assert not any(p.huge_pages for p in small)


def _limits(bytes_per_second: float, peaks: dict[str, tuple[str, float]]) -> tuple[BandwidthLimit, PeakLimit]:
    """Limits without a measurement."""
    bandwidth, peak = BandwidthLimit.__new__(BandwidthLimit), PeakLimit.__new__(PeakLimit)
    slow, fast = ReadPattern(0, 0, "t0", True), ReadPattern(65536, 2048, "t0", True)
    bandwidth.speeds = {slow: bytes_per_second / 2, fast: bytes_per_second}
    peak._row_types = {unit: kind for unit, (kind, _) in peaks.items()}
    peak.speeds = {unit: speed for unit, (_, speed) in peaks.items()}
    return bandwidth, peak


PEAKS = {"f": ("float32", 2e9), "b": ("bfloat16", 8e9), "slow b": ("bfloat16", 1e9), "i": ("int8", 16e9)}


def test_peak_of_the_best_unit() -> None:
    """A row type takes the fastest unit of its own or of float32, which can compute every product."""
    _, peak = _limits(1.0, PEAKS)
    assert peak.best("bfloat16") == (8e9, "b")
    assert peak.best("int8") == (16e9, "i")
    assert peak.best("float32") == (2e9, "f")
    _, old = _limits(1.0, {"f": ("float32", 2e9), "i": ("int8", 1e9)})
    assert old.best("bfloat16") == old.best("int8") == (2e9, "f")
    assert limits.row_type_of("int8_w8a8") == "int8"
    assert limits.row_type_of("float32") == "float32"
    assert limits.row_type_of("int4_g32") == limits.row_type_of("bfloat16") == "bfloat16"


def _measured(seconds: tuple[float, ...], pairs: float) -> Measured:
    held = WorkingSet(expert_bytes=1000, num_experts=4, num_layers=2, model_experts=4, cache_bytes=100)
    times = Times(seconds, distinct_experts=3.0, pairs=pairs, interleaved=(7e5, 1e6, 8e5))
    return Measured(TINY, "bfloat16", "avx2", "some_kernel", 2, 5, held, times)


def test_ratio_of_a_row_bound_by_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """3 experts of 1000 bytes at 1 MB/s are 3 ms; the median of the calls took 6."""
    row = compare(_measured((0.005, 0.006, 0.010), pairs=3.0), *_limits(1e6, PEAKS))
    assert row.limit_ms == pytest.approx(3.0)
    assert row.ratio == row.ratio_bandwidth == pytest.approx(0.5)
    assert row.ratio_min_ms == pytest.approx(0.6)
    assert row.ratio_peak == pytest.approx(3 * 12288 / 0.006 / 8e9)
    assert (row.limit_unit, row.iterations, row.median_ms) == ("b", 3, pytest.approx(6.0))
    assert (row.gb_per_second, row.limit_gb_per_second) == (pytest.approx(5e-4), pytest.approx(1e-3))
    assert (row.interleaved_gb_per_second, row.ratio_interleaved) == (
        pytest.approx(8e-4),
        pytest.approx(0.625),
    )
    TABLE.print_row(row)
    assert "0.500" in capsys.readouterr().out


def test_ratio_of_a_row_bound_by_the_peak() -> None:
    """10^6 pairs of 12288 operations at 8 GFLOP/s are 1.536 s."""
    row = compare(_measured((3.072,), pairs=1e6), *_limits(1e6, PEAKS))
    assert row.limit_ms == pytest.approx(1536)
    assert row.ratio == row.ratio_peak == pytest.approx(0.5)
    assert row.tflop_per_second == pytest.approx(0.004)


def test_refresh_only_raises_the_limit() -> None:
    """The best patterns are measured again; a slower result never lowers the run's best."""
    bandwidth, _ = _limits(1e6, PEAKS)
    asked: list[int] = []

    def slower(**pattern: int | str) -> float:
        asked.append(cast(int, pattern["block_bytes"]))
        return 4e5

    bandwidth._probe = cast(limits._kernels_testing.BandwidthProbe, SimpleNamespace(measure=slower))  # type: ignore[name-defined]
    bandwidth.refresh()
    assert set(asked) == {0, 65536}
    asked.clear()
    assert bandwidth.refresh_best() == 4e5
    assert asked == [65536]
    assert bandwidth.best[0] == 1e6


def test_caches_are_counted_once(tmp_path: Path) -> None:
    """Two cpus of one cache and one of another."""
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2")):
        directory = tmp_path / f"cpu{cpu}" / "cache" / "index3"
        directory.mkdir(parents=True)
        (directory / "size").write_text("2048K\n")
        (directory / "shared_cpu_list").write_text(shared + "\n")
    assert limits.cache_bytes([0, 1], tmp_path) == 2 * MIB
    assert limits.cache_bytes([0, 1, 2], tmp_path) == 4 * MIB
    assert limits.cache_bytes([7], tmp_path) == 0


def test_probe_is_larger_than_the_cache() -> None:
    assert limits.probe_bytes(cache=100 * MIB, memory=64 << 30) == 800 * MIB
    assert limits.probe_bytes(cache=0, memory=64 << 30) == 512 * MIB
    assert limits.probe_bytes(cache=1 << 30, memory=8 << 30) == 1 << 30


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits over 8 MiB, as this test does not report them."""
    monkeypatch.setattr(kernels, "probe_bytes", lambda cache, memory: 8 * MIB)
    monkeypatch.setattr(limits, "PEAK_SECONDS", 0.005)
    monkeypatch.setattr(kernels, "cache_bytes", lambda cpus: 1000)


TINY_OPTIONS = KernelsOptions([TINY], ["bfloat16", "int8_w8a8"], [1, 3], seconds=0.01)


@pytest.mark.usefixtures("small_probe")
def test_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON row per (shape, format, rows), whose figures agree with each other and with the table."""
    target = tmp_path / "rows.json"
    rows = kernels.run(replace(TINY_OPTIONS, threads=1), target)
    assert [(row.format, row.rows) for row in rows] == list(
        itertools.product(["bfloat16", "int8_w8a8"], [1, 3])
    )
    written = json.loads(target.read_text())
    assert written == [asdict(row) for row in rows]
    for row in rows:
        # bfloat16: 64 wide, gate and up 2 x 2 panels of 16 columns, down 4 panels of k = 32 padded to 64.
        expert_bytes = row.weight_bytes / row.distinct_experts
        assert expert_bytes >= (1 if row.format == "int8_w8a8" else 2) * 3 * 64 * 32
        assert row.operations == pytest.approx(TINY.operations(2 * row.rows))
        assert row.ratio == pytest.approx(max(row.ratio_bandwidth, row.ratio_peak))
        assert 0 < row.min_ms <= row.median_ms
        assert row.iterations >= 5
        assert row.kernel
        assert row.threads == 1
    printed = capsys.readouterr().out
    assert "64x32x4x2: hidden 64, intermediate 32, 4 experts, 2 per row" in printed
    assert "contiguous slices" in printed


@pytest.mark.usefixtures("small_probe")
def test_tiny_run_with_rows_per_expert() -> None:
    """Exactly the given rows for every expert, hence all experts."""
    (row,) = kernels.run(replace(TINY_OPTIONS, formats=["mxfp4"], rows_per_expert=[5]))
    assert (row.rows, row.rows_per_expert, row.distinct_experts) == (10, 5, 4)


@pytest.mark.usefixtures("small_probe")
def test_forced_kernel_is_used_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    options = replace(TINY_OPTIONS, formats=["bfloat16"], rows=[2], isa="scalar", print_plan=True)
    (row,) = kernels.run(replace(options, kernel="scalar_float32"))
    assert (row.isa, row.kernel) == ("scalar", "scalar_float32")
    shown = r"^  down bfloat16, bfloat16 request, 1 .*rows.*: scalar_float32 \(\d+ ns per panel\)$"
    assert re.search(shown, capsys.readouterr().out, re.MULTILINE)


def test_table_is_by_shape(capsys: pytest.CaptureFixture[str]) -> None:
    row = compare(_measured((0.006,), pairs=3.0), *_limits(1e6, PEAKS))
    kernels.print_table([row, replace(row, shape="other"), row])
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if " " not in line] == ["64x32x4x2", "other"]
    TABLE.print_row(row)
    assert printed.count(capsys.readouterr().out.rstrip("\n")) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_measure_counts_what_the_calls_touch(shared: bool) -> None:
    """Every call computes rows x top_k pairs, on every layer in turn; other processes can map the weights."""
    engine = EngineSetting(choose_cpus(1), shared=shared).build(TINY, "bfloat16", 4, 3)
    assert (engine.segment_state is not None) is shared
    held = WorkingSet(1000, 4, 3, 4, 100)
    calls = calls_of(2, TINY, held, exact_rows_per_expert=False)
    times = measure(engine, 3, calls, seconds=0.001)
    assert times.pairs == 4
    assert 2 <= times.distinct_experts <= 4
    counted = engine.stats()
    assert counted.rows == 2 * counted.calls == 2 * (len(times.seconds) + 3)
    assert counted.layer_calls.min() > 0
    assert kernel_names(engine, 1.0)
    interleaved = iter(range(100))
    times = measure(engine, 3, calls, 0.001, between=lambda: float(next(interleaved)))
    assert times.interleaved[0] == 0.0


def test_pairs_do_the_same_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines compute each call, who is first changes, and what slows the machine down for a while
    changes nothing of the ratio."""
    now, called = [0.0], []

    class Engine:
        backend = EngineSetting(choose_cpus(1)).build(TINY, "bfloat16", 4, 1).backend

        def __init__(self, name: str, seconds: float) -> None:
            self.name, self.seconds = name, seconds

        def forward(self, layer: int, hidden_states: Any, topk_ids: Any, *_: Any, **__: Any) -> None:
            called.append((self.name, layer, topk_ids.tobytes()))
            now[0] += self.seconds * (1 + (len(called) - 1) // 2 % 5)

    monkeypatch.setattr("lab.bench.kernels_measure.time.perf_counter", lambda: now[0])
    calls = calls_of(2, TINY, WorkingSet(1000, 4, 3, 4, 100), exact_rows_per_expert=False)
    engines: Any = (Engine("private", 1.0), Engine("shared", 1.5))
    ratio = measure_pairs(engines, 3, calls, seconds=40.0)
    assert ratio == pytest.approx(1.5)
    pairs = [called[i : i + 2] for i in range(0, len(called), 2)]
    assert len(pairs) >= 5
    assert all(first[1:] == second[1:] for first, second in pairs)
    assert [first[0] for first, _ in pairs[:4]] == ["private", "shared", "private", "shared"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "bf16"], "--format: 'bf16' is unknown; allowed: float32, bfloat16"),
        (["--shape", "nothing"], "--shape: 'nothing' is not allowed"),
        (["--rows", "0"], "--rows: '0' is not allowed"),
        (["--rows-per-expert", "a"], "--rows-per-expert: 'a' is not allowed"),
        (["--isa", "neon"], "--isa: 'neon' is not allowed here; allowed: auto, scalar"),
        (["--threads", "100000"], "--threads: 100000 is not allowed; allowed: 1 to"),
        (["--threads", "-1"], "--threads: -1 is not allowed"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", *arguments])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(message)


@pytest.mark.usefixtures("small_probe")
def test_unknown_kernel_and_unwritable_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"64x32x4x2, bfloat16: .*'no_such_kernel'"):
        kernels.run(replace(TINY_OPTIONS, kernel="no_such_kernel"))
    with pytest.raises(UserError, match=r"--json .*: No such file or directory"):
        kernels.run(replace(TINY_OPTIONS, formats=["bfloat16"], rows=[1]), tmp_path / "none" / "rows.json")
