"""Guards the comparison with kt-kernel (`lab/baselines`): the baseline's best number of threads counts, the
ratio is its time over ours, and its source weights are the bytes it reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from lab.baselines import compare_kt_kernel, kt_kernel_formats, kt_kernel_golden, kt_kernel_worker
from lab.bench.kernels_inputs import ExpertShape, Routing, WorkingSet
from lab.bench.kernels_measure import Times

TINY = ExpertShape("64x32x4x2", 64, 32, 4, 2)
HELD = WorkingSet(expert_bytes=1000, num_experts=4, num_layers=2, model_experts=4, cache_bytes=100)


def test_best_threads_count() -> None:
    """2 threads collapse to 8 ms, 1 takes 4 (median): 4 against our 2 is a ratio of 2."""
    baseline = {2: [0.008, 0.003, 0.009], 1: [0.004, 0.005, 0.004]}
    ours = Times([0.002, 0.001, 0.003], distinct_experts=3.0, pairs=4.0)
    row = compare_kt_kernel.comparison(
        TINY, "FP8", Path("_kt_x.cpython.so"), HELD, 2, baseline, 0.01, ours, 2, "some_kernel"
    )
    assert row.baseline_median_ms == {2: pytest.approx(8), 1: pytest.approx(4)}
    assert (row.baseline_threads, row.baseline_ms, row.ratio) == (1, pytest.approx(4), pytest.approx(2))
    assert (row.baseline_min_ms, row.ratio_min) == (pytest.approx(3), pytest.approx(3))
    assert (row.our_format, row.baseline_build, row.our_kernel) == ("fp8_block", "_kt_x", "some_kernel")
    assert row.baseline_relative_error == 0.01
    assert "2: 8.00, 1: 4.00" in compare_kt_kernel.line(row)
    assert json.loads(json.dumps(asdict(row)))["ratio"] == pytest.approx(2)


def test_baseline_threads() -> None:
    """N, N - 1 and N - 2, as far as there are any."""
    assert compare_kt_kernel.baseline_threads("", 16) == [16, 15, 14]
    assert compare_kt_kernel.baseline_threads("", 2) == [2, 1]
    assert compare_kt_kernel.baseline_threads("", 1) == [1]
    assert compare_kt_kernel.baseline_threads("8,4", 16) == [8, 4]


def test_job_survives_the_way_to_its_process() -> None:
    job = kt_kernel_worker.Job("module.so", "BF16", TINY, HELD, [1, 4], False, 2, [0, 1], 0.5)
    assert kt_kernel_worker.Job.from_json(json.dumps(asdict(job))) == job


@pytest.mark.parametrize(
    ("name", "weight_bytes", "scales", "dtype"),
    [
        ("BF16", 2 * 256 * 128, None, None),
        ("INT8", 2 * 256 * 128, None, None),
        ("FP8", 256 * 128, (3, 2, 1), np.float32),
        ("FP8_PERCHANNEL", 256 * 128, (3, 256), np.float32),
        ("RAWINT4", 256 * 64, (3, 256, 4), np.uint16),
        ("MXFP4", 256 * 64, (3, 256, 4), np.uint16),
    ],
)
def test_source_has_the_bytes_the_baseline_reads(
    name: str, weight_bytes: int, scales: tuple[int, ...] | None, dtype: type | None
) -> None:
    """Three matrices of 256 x 128; every code is a finite number."""
    source = kt_kernel_formats.random_source(
        kt_kernel_formats.FORMATS[name], 3, 256, 128, np.random.default_rng(1)
    )
    assert source.weights.nbytes == 3 * weight_bytes
    assert (None if source.scales is None else source.scales.shape) == scales
    assert source.scales is None or source.scales.dtype == dtype
    if name == "BF16":
        values = (source.weights.astype(np.uint32) << 16).view(np.float32)
        assert np.abs(values).min() >= 2**-7
        assert np.abs(values).max() < 2**-5
        assert 0.4 < (values > 0).mean() < 0.6
    if name.startswith("FP8"):
        assert not np.isin(source.weights, [0x7F, 0xFF]).any()


def test_golden_of_the_baseline() -> None:
    """Codes and scales are read as their formats say; a layer is the weighted sum of its experts."""
    values = kt_kernel_golden.float8_values()
    assert values[[0x38, 0xB8, 0x01, 0x7E, 0x00]].tolist() == [1.0, -1.0, 2.0**-9, 448.0, 0.0]
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    assert np.isfinite(np.delete(values, [0x7F, 0xFF])).all()
    scale = np.full((1, 1, 1), 0x4000, dtype=np.uint16)  # 2.0
    codes = np.arange(16, dtype=np.uint8) * 17  # 0x00, 0x11, ... 0xff
    source = kt_kernel_formats.Source(codes, scale)
    for name, expected in (("RAWINT4", np.arange(16) - 8), ("MXFP4", kt_kernel_golden.FLOAT4)):
        weights = kt_kernel_golden.dequantise(kt_kernel_formats.FORMATS[name], source, 0, 1, 32)
        assert weights.tolist() == [(2.0 * expected).repeat(2).tolist()]
    blocks = kt_kernel_formats.Source(
        np.full(256 * 128, 0x38, dtype=np.uint8), np.array([[[2.0], [3.0]]], np.float32)
    )
    weights = kt_kernel_golden.dequantise(kt_kernel_formats.FORMATS["FP8"], blocks, 0, 256, 128)
    assert (weights[:128] == 2).all()
    assert (weights[128:] == 3).all()


def test_golden_layer_is_a_weighted_sum() -> None:
    """Weights of 1 and a row of ones: gate and up are the width, silu(4) * 4, summed over 2, times 0.75."""
    ones = kt_kernel_formats.Source(np.full(3 * 4 * 2, 0x3F80, dtype=np.uint16), None)
    call = Routing(np.array([[2, 0]], np.int32), np.array([[0.5, 0.25]], np.float32), 2, 2)
    row = np.full((1, 4), 0x3F80, dtype=np.uint16)
    result = kt_kernel_golden.layer_row(kt_kernel_formats.FORMATS["BF16"], [ones] * 3, row, call, 2)
    np.testing.assert_allclose(result, [0.75 * 2 * 16 / (1 + np.exp(-4.0))] * 4, rtol=1e-6)


def test_best_build_of_the_levels(tmp_path: Path) -> None:
    """A build above what the machine runs, or of another Python, is never taken."""
    folder = tmp_path / "kt_kernel"
    folder.mkdir()
    for variant in ("amx", "avx512_bf16", "avx2"):
        (folder / f"_kt_kernel_ext_{variant}.cpython-312-x86_64-linux-gnu.so").touch()
    levels = ["scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
    for count, variant in ((6, "amx"), (5, "avx512_bf16"), (4, "avx2"), (2, "avx2")):
        found = kt_kernel_formats.find_module(tmp_path, levels[:count], "cpython-312")
        assert found.name.startswith(f"_kt_kernel_ext_{variant}.")
    with pytest.raises(FileNotFoundError, match=r"holds no _kt_kernel_ext_<variant>\.cpython-311"):
        kt_kernel_formats.find_module(tmp_path, levels, "cpython-311")
    with pytest.raises(FileNotFoundError, match="variants: amx, avx512_bf16"):
        kt_kernel_formats.find_module(tmp_path, ["scalar"], "cpython-312")


def test_wrong_options_end_with_one_line(tmp_path: Path) -> None:
    """The name of what was wrong, what is allowed, and no traceback."""
    module = tmp_path / "none.so"
    for arguments, message in (
        (["--format", "Q4"], "--format: 'Q4' is unknown; allowed: BF16, FP8"),
        (["--shape", "x"], "--shape: 'x' is not allowed"),
        (["--shape", "64x32x4x2", "--format", "BF16", "--baseline-threads", "a"], "--baseline-threads: 'a'"),
        (["--shape", "64x32x4x2", "--format", "BF16"], "kt-kernel BF16 with .* threads ended 1"),
    ):
        with pytest.raises(SystemExit, match=f"compare_kt_kernel: error: {message}"):
            compare_kt_kernel.main(["--module", str(module), "--rows", "1", *arguments])
