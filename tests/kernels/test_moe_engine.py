"""ExpertEngine refuses bad input by name, counts what it did, and takes memory only for loaded layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moebius.kernels import ExpertEngine
from moebius.kernels.source import SourceMatrix
from tests.helpers.moe_golden import golden, load_layer, random_expert, random_rows, relative_error

HIDDEN, INTERMEDIATE = 24, 20
F32 = np.float32


def small_engine(**options: Any) -> ExpertEngine:
    """Returns experts 2 and 3 of 3 layers; layer 1 loaded unless a test loads more."""
    arguments: dict[str, Any] = {"weight_format": "float32", "expert_begin": 2, "num_threads": 1, **options}
    return ExpertEngine(HIDDEN, INTERMEDIATE, 2, 3, **arguments)


@pytest.fixture
def engine() -> ExpertEngine:
    engine = small_engine()
    rng = np.random.default_rng(0)
    load_layer(engine, 1, {e: random_expert(rng, HIDDEN, INTERMEDIATE) for e in (2, 3)})
    return engine


def matrices(**replaced: Any) -> tuple[Any, Any, Any]:
    gate, up, down = random_expert(np.random.default_rng(0), HIDDEN, INTERMEDIATE)
    return replaced.get("gate", gate), replaced.get("up", up), replaced.get("down", down)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_format": "int7"}, "weight format 'int7' is unknown; allowed: float32, bfloat16"),
        (
            {"weight_format": ["int8", "int8"]},
            "weight_format names 2 formats; it must be one, or one per layer",
        ),
        ({"down_format": "int7"}, "weight format 'int7'"),
        (
            {"weight_format": ["int8"] * 3, "down_format": ["int8"] * 2},
            "3 formats and down_format 2; they must be as many, or one",
        ),
        (
            {"activation": "relu"},
            "activation='relu'.*silu, silu_clamped, gpt_oss, relu2, gelu_tanh, clamped_silu",
        ),
        ({"activation": "gpt_oss", "limit": 0.0}, "limit is 0.0"),
        ({"activation": "silu_clamped", "limit": [7.0, 0.0, 7.0]}, "limit is 0.0"),
        ({"limit": [7.0, 7.0]}, r"limit has 2 numbers; it must be one, or one per layer \(3\)"),
        ({"activation": "gpt_oss", "alpha": float("nan")}, "alpha is nan"),
        ({"kernel": "fast"}, "kernel 'fast' is unknown.*scalar_float32"),
        ({"kernel": "scalar_int8"}, "kernel 'scalar_int8' computes none of"),
        ({"isa": "mmx"}, "isa='mmx'.*scalar"),
        ({"num_threads": -1}, "num_threads is -1"),
        ({"expert_begin": -5}, "expert_begin is -5"),
        ({"num_threads": 2, "cpus": [0, 100000]}, "cpu 100000"),
    ],
)
def test_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_engine(**options)


@pytest.mark.parametrize("index", range(4))
def test_zero_sizes_are_named(index: int) -> None:
    sizes = [8, 8, 2, 2]
    sizes[index] = 0
    name = ("hidden_size", "intermediate_size", "num_experts", "num_layers")[index]
    with pytest.raises(ValueError, match=f"{name} is 0"):
        ExpertEngine(*sizes, weight_format="float32")


@pytest.mark.parametrize(
    ("layer", "expert", "replaced", "message"),
    [
        (3, 2, {}, "layer 3 does not exist; allowed: 0 to 2"),
        (-1, 2, {}, "layer is -1"),
        (0, 1, {}, "expert 1 is not held here; allowed: 2 to 3"),
        (0, 4, {}, "expert 4 is not held here"),
        (1, 2, {}, "layer 1.*loaded already"),
        (
            0,
            2,
            {"gate": np.zeros((INTERMEDIATE, 9), F32)},
            r"gate has shape \[20, 9\]; it must be \[20, 24\]",
        ),
        (0, 2, {"down": np.zeros((INTERMEDIATE, HIDDEN), F32)}, "down has shape"),
        (0, 2, {"up": np.zeros(5, F32)}, "up.codes: it has 1 dimensions"),
        (0, 2, {"up": np.zeros((INTERMEDIATE, HIDDEN))}, "up.codes: its dtype is float64"),
        (0, 2, {"gate": None}, "gate is None; only the activation relu2 does without"),
        (
            0,
            2,
            {"up": SourceMatrix(np.zeros((INTERMEDIATE, HIDDEN), F32), bias=np.zeros(INTERMEDIATE, F32))},
            "bias",
        ),
    ],
)
def test_bad_load_is_named(
    engine: ExpertEngine, layer: int, expert: int, replaced: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.load_expert(layer, expert, *matrices(**replaced))


def test_refused_load_leaves_expert_loadable(engine: ExpertEngine) -> None:
    """A shape error must not count as the one load an expert has."""
    with pytest.raises(ValueError, match="gate has shape"):
        engine.load_expert(0, 2, *matrices(gate=np.zeros((1, 1), F32)))
    engine.load_expert(0, 2, *matrices())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, i, w: (3, x, i, w), "layer 3 does not exist"),
        (lambda x, i, w: (0, x, i, w), "layer 0: expert . is not loaded"),
        (lambda x, i, w: (1, x[:, :-1], i, w), "hidden_states has shape"),
        (lambda x, i, w: (1, x[0], i, w), "hidden_states must be"),
        (lambda x, i, w: (1, x, i[0], w), "topk_ids must be"),
        (lambda x, i, w: (1, x, i[:-1], w), "topk_ids has shape"),
        (lambda x, i, w: (1, x, i, w[:, :1]), "topk_weights has shape"),
        (lambda x, i, w: (1, x.astype(np.float64), i, w), "hidden_states has dtype float64"),
        (lambda x, i, w: (1, x, i.astype(np.int64), w), "topk_ids has dtype int64"),
        (lambda x, i, w: (1, x, i, w.astype(np.float16)), "topk_weights has dtype float16"),
        (lambda x, i, w: (1, x, i[:, :0], w[:, :0]), "top_k is 0"),
    ],
)
def test_bad_forward_is_named(
    engine: ExpertEngine, change: Callable[..., tuple[Any, ...]], message: str
) -> None:
    routed = random_rows(np.random.default_rng(0), 4, HIDDEN, 2, (2, 4))
    with pytest.raises(ValueError, match=message):
        engine.forward(*change(routed.hidden_states, routed.topk_ids, routed.topk_weights))
    assert engine.stats().calls == 0


def test_strided_input_is_read_right() -> None:
    """Views (a column slice of down, every second row) give what their copies give."""
    rng = np.random.default_rng(0)
    wide = random_expert(rng, HIDDEN, 2 * INTERMEDIATE)
    expert = (wide[0][::2], wide[1][::2], wide[2][:, :INTERMEDIATE])
    engine = small_engine()
    engine.load_expert(0, 2, *expert)
    routed = random_rows(rng, 6, 2 * HIDDEN, 1, (2, 3))
    half = routed.hidden_states[:, ::2]
    output = engine.forward(0, half, routed.topk_ids, routed.topk_weights)
    wanted = golden(type(routed)(half, routed.topk_ids, routed.topk_weights), {2: expert})
    assert relative_error(output, wanted) <= 1e-5


def test_stats_count_calls_rows_and_experts(engine: ExpertEngine) -> None:
    """Counters per layer and expert; rows without a local expert count as rows of the layer only."""
    x = np.ones((3, HIDDEN), F32)
    ids = np.array([[2, 3], [-1, 3], [0, 7]], np.int32)
    output = engine.forward(1, x, ids, np.ones((3, 2), F32))
    engine.forward(1, x[:0], ids[:0], np.ones((0, 2), F32))
    stats = engine.stats()
    assert not output[2].any()
    assert (stats.calls, stats.rows, stats.nonfinite_outputs) == (2, 3, 0)
    assert stats.busy_seconds > 0
    assert stats.layer_calls.tolist() == [0, 2, 0]
    assert stats.layer_rows.tolist() == [0, 3, 0]
    assert stats.layer_experts.tolist() == [0, 2, 0]
    assert stats.expert_rows.tolist() == [[0, 0], [1, 2], [0, 0]]
    assert stats.expert_rows.dtype == np.uint64


def test_memory_is_taken_per_loaded_layer() -> None:
    """No layer costs memory before its first expert; each costs at least its weights."""
    engine = small_engine()
    assert engine.packed_bytes == 0
    engine.load_expert(0, 2, *matrices())
    first = engine.packed_bytes
    assert first >= 2 * 3 * HIDDEN * INTERMEDIATE * 4
    engine.load_expert(0, 3, *matrices())
    assert engine.packed_bytes == first
    engine.load_expert(2, 3, *matrices())
    assert engine.packed_bytes == 2 * first
    assert 0 <= engine.huge_page_bytes() <= engine.packed_bytes


def test_a_layer_takes_memory_for_what_was_reserved() -> None:
    """Any expert may have the room; one more than that is refused by name, and results are the same."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_experts": 40,
        "num_layers": 1,
    }
    rng = np.random.default_rng(1)
    experts = {expert: random_expert(rng, HIDDEN, INTERMEDIATE) for expert in range(40)}
    whole, part = (ExpertEngine(**sizes, weight_format="float32", num_threads=1) for _ in range(2))
    part.reserve(0, 2)
    load_layer(whole, 0, experts)
    load_layer(part, 0, {expert: experts[expert] for expert in (31, 7)})
    assert 0 < part.packed_bytes < whole.packed_bytes / 8
    for expert in (31, 7):
        assert np.array_equal(part.packed_expert(0, expert), whole.packed_expert(0, expert))
    rows, ids = rng.standard_normal((3, HIDDEN), F32), np.array([[7], [31], [7]], np.int32)
    weights = np.ones(ids.shape, F32)
    assert np.array_equal(part.forward(0, rows, ids, weights), whole.forward(0, rows, ids, weights))
    with pytest.raises(ValueError, match="local expert 3 has no room next to the 2 that were reserved"):
        part.load_expert(0, 3, *experts[3])
    with pytest.raises(ValueError, match="expert 3 is not loaded"):
        part.forward(0, rows, np.full_like(ids, 3), weights)


@pytest.mark.parametrize(
    ("layer", "count", "message"),
    [(0, 0, "room for 0 experts"), (0, 3, "allowed are 1 to 2"), (1, 1, "memory already"), (3, 1, "layer 3")],
)
def test_what_can_not_be_reserved_is_named(
    engine: ExpertEngine, layer: int, count: int, message: str
) -> None:
    """A number of experts that is not possible, a layer that is loaded, one that does not exist."""
    with pytest.raises(ValueError, match=message):
        engine.reserve(layer, count)
