"""Guards that an expert server computes what a checkpoint means, in every format and any division."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from expert_service.errors import RequantiseError
from expert_service.host import ExpertHost, LoadedSlice, LoadSettings
from expert_service.metrics import make_registry
from expert_service.placement import ThreadPlacement
from gpu_service.experts.local_client import LocalExpertClient
from moebius.checkpoint.errors import CheckpointError
from moebius.experts.slices import SliceRequest
from moebius.kernels import FloatArray
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests.helpers.model_formats import MODEL_FORMATS, ModelFormat, act_ordered
from tests.helpers.quantised_checkpoints import QUANTIZATION_CONFIGS, GptOssMoe, QuantisedMoe, Weights
from tests.helpers.quantised_models import quantise, write_plain
from tests.tolerances import EXPERTS_FLOAT32, EXPERTS_W8A8

ROWS = 9
Floats = NDArray[np.float32]


def host_of(
    model: Path, threads: int = 2, settings: LoadSettings | None = None, **request: Any
) -> ExpertHost:
    """Returns a server in this process that has loaded its share."""
    settings = settings or LoadSettings(calibrate_kernels=False)
    host = ExpertHost(ThreadPlacement(-1, threads, ()), lambda *_: None, lambda: None, settings)
    host.load(SliceRequest(str(model), **request))
    return host


def loaded_of(host: ExpertHost) -> LoadedSlice:
    assert host.loaded is not None
    return host.loaded


def rows_of(geometry: MoeGeometry) -> tuple[FloatArray, NDArray[np.int32], Floats]:
    """Returns hidden states and a routing in which some choices belong to no server."""
    rng = np.random.default_rng(3)
    ids = rng.integers(-1, geometry.num_experts, (ROWS, geometry.top_k)).astype(np.int32)
    hidden: Floats = rng.standard_normal((ROWS, geometry.hidden_size), np.float32)
    return hidden, ids, rng.random(ids.shape, np.float32)


def golden(
    weights: Weights, layer: int, hidden: FloatArray, ids: NDArray[np.int32], router: Floats
) -> NDArray[np.float64]:
    """Returns the routed experts in float64."""
    output = np.zeros(hidden.shape)
    for row, choice in np.argwhere(ids >= 0):
        x, expert = hidden[row].astype(np.float64), int(ids[row, choice])
        gate, up = (weights[layer, expert, matrix].astype(np.float64) @ x for matrix in ("gate", "up"))
        intermediate = gate / (1 + np.exp(-gate)) * up
        output[row] += router[row, choice] * (
            weights[layer, expert, "down"].astype(np.float64) @ intermediate
        )
    return output


def distance(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("encoder", list(QUANTIZATION_CONFIGS))
def test_every_format_computes_what_it_means(tmp_path: Path, encoder: str) -> None:
    """Whole, by intermediate channels over two servers, and by experts over two: the golden of the
    dequantised weights.
    """
    moe = QuantisedMoe(encoder)
    model = moe.write(tmp_path)
    geometry = read_geometry(model)
    tolerance = EXPERTS_W8A8 if encoder == "int8_w8a8" else EXPERTS_FLOAT32
    divisions: list[dict[str, Any]] = [{}, {"split": "expert", "split_count": 2}]
    # 160 intermediate channels have a single whole block of 128.
    if not encoder.endswith(("fp8_block", "_256", "_128", "g128", "g128_v2")):
        divisions.append({"split_count": 2})
    for division in divisions:
        count = division.get("split_count", 1)
        hosts = [host_of(model, **division, split_index=index) for index in range(count)]
        for layer in geometry.moe_layers:
            rows = rows_of(geometry)
            found = sum(host.forward(layer, *rows).astype(np.float64) for host in hosts)
            assert distance(np.asarray(found), golden(moe.weights, layer, *rows)) < tolerance, division
        assert all(not any(loaded_of(host).relative_errors.values()) for host in hosts)


@pytest.mark.parametrize("count", [1, 2])
def test_gpt_oss_computes_what_it_means(tmp_path: Path, count: int) -> None:
    """MXFP4 with biases and the clamped activation; a down bias must count once, not per server."""
    moe = GptOssMoe()
    model = moe.write(tmp_path)
    geometry = read_geometry(model)
    hosts = [host_of(model, split_count=count, split_index=index) for index in range(count)]
    rows = rows_of(geometry)
    found = sum(host.forward(1, *rows).astype(np.float64) for host in hosts)
    reference = LocalExpertClient(str(model), geometry, torch.float32)
    wanted = reference.collect(reference.submit(1, *map(torch.from_numpy, rows))).numpy()
    assert distance(np.asarray(found), wanted) < EXPERTS_FLOAT32
    hidden, ids, router = (array.astype(np.float64) for array in rows)
    expected = np.zeros(hidden.shape)
    for row, choice in np.argwhere(ids >= 0):
        expert = int(ids[row, choice])
        gate, up = (
            moe.weights[1, expert, matrix] @ hidden[row] + moe.biases[1, expert, matrix]
            for matrix in ("gate", "up")
        )
        gate, up = np.minimum(gate, 5.0), np.clip(up, -5.0, 5.0)
        intermediate = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        result = moe.weights[1, expert, "down"] @ intermediate + moe.biases[1, expert, "down"]
        expected[row] += router[row, choice] * result
    assert distance(np.asarray(found), expected) < EXPERTS_FLOAT32


@pytest.mark.parametrize("encoder", ["fp8_block", "awq_int4_g32", "nvfp4"])
def test_the_reference_reads_quantised_checkpoints(tmp_path: Path, encoder: str) -> None:
    """`expert_transport local`, with which parity is checked."""
    moe = QuantisedMoe(encoder)
    model = moe.write(tmp_path)
    geometry = read_geometry(model)
    reference = LocalExpertClient(str(model), geometry, torch.float32)
    rows = rows_of(geometry)
    found = reference.collect(reference.submit(0, *map(torch.from_numpy, rows))).numpy()
    assert distance(found, golden(moe.weights, 0, *rows)) < EXPERTS_FLOAT32


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("float32", 0, 0), ("bfloat16", 1e-3, 2e-3), ("int8", 1e-3, 1e-2), ("int4", 0.02, 0.1)],
)
@pytest.mark.parametrize("encoder", ["float32", "fp8_channel", "compressed_int4_g64_zeros"])
def test_requantising(tmp_path: Path, encoder: str, dtype: Any, low: float, high: float) -> None:
    """Any format to any: errors reported per layer are plausible, and results differ by no more than that."""
    moe = QuantisedMoe(encoder)
    model = moe.write(tmp_path)
    geometry = read_geometry(model)
    host = host_of(model, weight_dtype=dtype)
    errors = loaded_of(host).relative_errors
    assert set(errors) == set(geometry.moe_layers)
    assert all(low <= error <= high for error in errors.values()), errors
    rows = rows_of(geometry)
    wanted = golden(moe.weights, 0, *rows)
    found = host.forward(0, *rows)
    # Three matrices, each with its own error.
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) <= max(3 * high, EXPERTS_FLOAT32)
    rounded = LocalExpertClient(str(model), geometry, torch.float32, dtype)
    repeated = rounded.collect(rounded.submit(0, *map(torch.from_numpy, rows))).numpy()
    assert distance(found, repeated) < EXPERTS_FLOAT32


def own_orders(name: str) -> Callable[[str], ModelFormat]:
    """GPTQ's: gate and up of an expert see the same rows, and have one order; its down has another."""

    def choose(matrix: str) -> ModelFormat:
        expert = re.search(r"experts\.(\d+)\.(\w+)_proj", matrix)
        return act_ordered(name, 0 if expert is None else 2 * int(expert[1]) + (expert[2] == "down"))

    return choose


@pytest.mark.parametrize("name", [name for name in MODEL_FORMATS if "act_order" in name])
def test_columns_in_the_order_of_activations(tmp_path: Path, name: str) -> None:
    """GPTQ's desc_act: experts are packed as they are stored and exact; each matrix has an order of its own.

    Servers that divide the channels hold those that the reference is asked for, as the self-test does.
    """
    config, plain = MODEL_FORMATS[name].config, write_plain("qwen3_moe", tmp_path / "plain")
    model = quantise(plain, own_orders(name), config)
    meant = model.dequantised().write(tmp_path / "meant")
    stored = model.write(tmp_path / "stored")
    geometry = read_geometry(stored)
    reference = LocalExpertClient(str(meant), geometry, torch.float32)
    rows = rows_of(geometry)

    def of(client: LocalExpertClient) -> Floats:
        return client.collect(client.submit(1, *map(torch.from_numpy, rows))).numpy()

    wanted = of(reference)
    host = host_of(stored)
    assert distance(host.forward(1, *rows), wanted) < EXPERTS_FLOAT32
    assert loaded_of(host).weight_format.split("/")[0].endswith("_ordered")
    assert not any(loaded_of(host).relative_errors.values())
    for dtype, allowed in (("float32", EXPERTS_FLOAT32), ("int8", 0.03)):
        assert distance(host_of(stored, weight_dtype=dtype).forward(1, *rows), wanted) < allowed
    # Groups of 128 are more than the channels.
    for dtype in () if name == "gptq_act_order_zeros" else ("float32", "keep"):
        total = np.zeros_like(wanted, np.float64)
        for index in range(2):
            half = host_of(stored, weight_dtype=dtype, split="tensor", split_count=2, split_index=index)
            part = loaded_of(half).part
            span = part.intermediate_begin, part.intermediate_end
            own = LocalExpertClient(
                str(stored), geometry, torch.float32, "keep" if dtype == "keep" else "float32",
                intermediate_range=span,
            )  # fmt: skip
            found = half.forward(1, *rows)
            assert distance(found, of(own)) < EXPERTS_FLOAT32
            total += found
        assert distance(total, wanted) < EXPERTS_FLOAT32


def test_gate_and_up_in_different_orders(tmp_path: Path) -> None:
    """They meet the same rows: refused by name, with the way out, which works."""
    plain = write_plain("qwen3_moe", tmp_path / "plain")
    model = quantise(
        plain,
        lambda name: act_ordered("gptq_act_order", int("gate_proj" in name)),
        MODEL_FORMATS["gptq_act_order"].config,
    )
    stored = model.write(tmp_path / "stored")
    message = (
        r"gate_proj\.qweight' and '.*up_proj\.qweight' .*g_idx.*requantise them with --expert-dtype int4"
    )
    with pytest.raises(CheckpointError, match=message):
        host_of(stored)
    assert host_of(stored, weight_dtype="int4").loaded is not None


def test_groups_of_unequal_size(tmp_path: Path) -> None:
    """A g_idx that fills no group has no packed form: refused by name."""
    plain = write_plain("qwen3_moe", tmp_path / "plain")
    model = quantise(plain, own_orders("gptq_act_order"), MODEL_FORMATS["gptq_act_order"].config)
    groups = model.tensors["model.layers.1.mlp.experts.2.down_proj.g_idx"]
    groups[groups == 0] = 1
    stored = model.write(tmp_path / "stored")
    with pytest.raises(
        CheckpointError, match=r"experts\.2\.down_proj\.g_idx' has groups of .*--expert-dtype"
    ):
        host_of(stored)


def test_too_large_an_error_refuses_to_serve(tmp_path: Path) -> None:
    """Layer, error, format and limit are named; nothing is served."""
    model = QuantisedMoe("bfloat16").write(tmp_path)
    host = ExpertHost(
        ThreadPlacement(-1, 1, ()), lambda *_: None, lambda: None, LoadSettings(max_requantise_error=0.02)
    )
    message = (
        r"layer 0: requantising to int4_g32 changed its experts by 0\.0\d+ .*requantise-error allows 0\.02"
    )
    with pytest.raises(RequantiseError, match=message):
        host.load(SliceRequest(str(model), weight_dtype="int4"))
    assert host.loaded is None
    assert not host.is_serving


@pytest.mark.parametrize("weight_dtype", ["keep", "int8"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_named(weight_dtype: str, value: float, tmp_path: Path) -> None:
    """Kept or requantised within any limit; the server does not become ready."""
    bad, name = np.ones((96, 160), np.float32), "model.layers.1.mlp.experts.0.down_proj.weight"
    bad[7, 7] = value
    model = QuantisedMoe("float32").write(tmp_path, {name: bad})
    with pytest.raises(CheckpointError, match=f"'{re.escape(name)}' holds NaN or infinite"):
        host_of(model, weight_dtype=weight_dtype, settings=LoadSettings(max_requantise_error=1e9))


def test_errors_and_nonfinite_inputs_are_exported(tmp_path: Path) -> None:
    """One gauge per layer, and a counter of bad inputs."""
    model = QuantisedMoe("bfloat16").write(tmp_path)
    host = host_of(model, weight_dtype="int4")
    geometry = loaded_of(host).model
    hidden, ids, router = rows_of(geometry)
    hidden[0, :3] = np.inf
    host.forward(0, hidden, ids, router)
    registry = make_registry(host)
    for layer, error in loaded_of(host).relative_errors.items():
        exported = registry.get_sample_value("moebius:expert_requantise_error", {"layer": str(layer)})
        assert exported == error > 0
    assert registry.get_sample_value("moebius:expert_nonfinite_inputs_total") == 3


def test_layers_may_differ_in_format(tmp_path: Path) -> None:
    """A checkpoint that leaves one layer unquantised: each keeps its own format."""
    moe = QuantisedMoe("compressed_int4_g32")
    tensors, _ = moe.tensors()
    changes: dict[str, Any] = {}
    for expert in range(3):
        for matrix in ("gate", "up", "down"):
            stem = f"model.layers.1.mlp.experts.{expert}.{matrix}_proj"
            changes |= {name: None for name in tensors if name.startswith(stem)}
            changes[f"{stem}.weight"] = moe.weights[1, expert, matrix]
    model = moe.write(tmp_path, changes)
    host = host_of(model)
    assert loaded_of(host).weight_format == "float32, int4_g32"
    for layer in (0, 1):
        rows = rows_of(loaded_of(host).model)
        assert distance(host.forward(layer, *rows), golden(moe.weights, layer, *rows)) < EXPERTS_FLOAT32


def test_kernels_are_calibrated_before_serving(tmp_path: Path) -> None:
    """The plan then holds measured times."""
    model = QuantisedMoe("int8").write(tmp_path)
    host = host_of(model, settings=LoadSettings(calibrate_kernels=True))
    assert any(row.nanoseconds > 0 for row in loaded_of(host).engine.plan())
