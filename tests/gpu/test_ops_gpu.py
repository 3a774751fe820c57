"""Invariant: on a GPU every library's implementation of every op is the torch reference on that GPU.

In bfloat16, float16 and float32, at the sizes of real models (Qwen3-30B-A3B, GLM-4.5-Air), at one row, a
decode batch and a prefill chunk; and whatever is chosen can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpu_service.ops import backends
from gpu_service.ops.backends import OPS, install, load_tables, uninstall
from gpu_service.ops.registry import Implementation
from gpu_service.ops.rope import RopeTable, rope_table
from gpu_service.ops.rope_frequencies import inverse_frequencies
from gpu_service.ops.sampling import mask_logits, truncate_probabilities
from moebius.models.layers.router import RouterConfig
from tests.helpers.ops import assert_same_op, example

pytestmark = pytest.mark.gpu
# The examples run in float16 too; each dtype, and each size that is new to a kernel, is compiled.
DTYPES = [torch.bfloat16, torch.float32]
ROWS = [1, 600]
LIBRARIES = ["triton", "flashinfer"]
BY_NAME = {op.name: op for op in OPS}


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _references_afterwards() -> Iterator[None]:
    yield
    uninstall("cuda")


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    """With what FlashInfer's second choices need compiled beforehand, side by side."""
    tables = load_tables(LIBRARIES)
    if "flashinfer" in tables:
        from flashinfer.jit.page import gen_page_module
        from flashinfer.jit.rope import gen_rope_module

        from gpu_service.ops.flashinfer import compile_modules

        compile_modules([gen_page_module(), gen_rope_module()])
    return tables


def _implementation(tables: dict[str, Any], library: str, op: str) -> Implementation:
    if library not in tables:
        pytest.skip(f"{library} cannot be imported here")
    if op not in tables[library]:
        pytest.skip(f"{library} has no {op}")
    found: Implementation = tables[library][op]
    return found


def _compare(
    tables: dict[str, Any],
    library: str,
    op: str,
    arguments: Callable[[], tuple[Any, ...]],
    dtype: torch.dtype,
) -> None:
    implementation = _implementation(tables, library, op)
    if implementation.supports is not None and not implementation.supports(*arguments()):
        pytest.skip(f"{library}'s {op} is not made for these arguments")
    assert_same_op(BY_NAME[op], implementation.function, arguments, dtype)


def _random(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_examples(
    op: Any, library: str, dtype: torch.dtype, device: torch.device, tables: dict[str, Any]
) -> None:
    _compare(tables, library, op.name, example(op, device, dtype), dtype)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2048, 7168, 200])
@pytest.mark.parametrize("rows", ROWS)
def test_norms(
    library: str, dtype: torch.dtype, size: int, rows: int, device: torch.device, tables: dict[str, Any]
) -> None:
    def fused() -> tuple[Any, ...]:
        x = _random(device, dtype, 2, rows, size)
        return x[0], x[1], _random(device, dtype, size, seed=1), 1e-6

    _compare(tables, library, "fused_add_rms_norm", fused, dtype)
    _compare(tables, library, "rms_norm", lambda: (fused()[0], *fused()[2:]), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_a_float32_update(dtype: torch.dtype, device: torch.device, tables: dict[str, Any]) -> None:
    def arguments() -> tuple[Any, ...]:
        update = _random(device, torch.float32, 33, 2048)
        residual, weight = _random(device, dtype, 33, 2048, seed=1), _random(device, dtype, 2048, seed=2)
        return update, residual, weight, 1e-6

    _compare(tables, "triton", "fused_add_rms_norm", arguments, dtype)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_in_the_fused_product(
    library: str, dtype: torch.dtype, device: torch.device, tables: dict[str, Any]
) -> None:
    def arguments() -> tuple[Any, ...]:
        return _random(device, dtype, 17, 40, 128)[:, 32:36], _random(device, dtype, 128, seed=1), 1e-6

    _compare(tables, library, "rms_norm", arguments, dtype)


def _table(
    device: torch.device, dtype: torch.dtype, rows: int, rotary_dim: int, interleaved: bool
) -> RopeTable:
    positions = (torch.arange(rows, device=device) * 7919) % 40_960
    frequencies = inverse_frequencies(1e6, rotary_dim, "default", {}).to(device)
    return rope_table(positions, frequencies, dtype, interleaved)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("interleaved", "rotary_dim"), [(False, 128), (False, 64), (True, 64)])
@pytest.mark.parametrize("rows", ROWS)
def test_rotation(
    library: str,
    dtype: torch.dtype,
    interleaved: bool,
    rotary_dim: int,
    rows: int,
    device: torch.device,
    tables: dict[str, Any],
) -> None:
    """The step's table, rotation in place, and rotation of normed queries and keys."""
    if library in tables:
        backends.install_tables(device, {library: tables[library]}, dtype)
    table = _table(device, dtype, rows, rotary_dim, interleaved)

    def rotation() -> tuple[Any, ...]:
        return _random(device, dtype, rows, 40, 128)[:, :36], table

    def normed() -> tuple[Any, ...]:
        q_weight, k_weight = _random(device, dtype, 2, 128, seed=1).unbind()
        return _random(device, dtype, rows, 40, 128)[:, :36], q_weight, k_weight, 1e-6, 32, table

    _compare(tables, library, "apply_rope", rotation, dtype)
    if library == "triton":
        _compare(tables, library, "qk_norm_rope", normed, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
def test_far_positions_keep_their_angles(
    interleaved: bool, device: torch.device, tables: dict[str, Any]
) -> None:
    """Fast sines lose all digits at such angles."""
    positions = torch.tensor([0, 1, 40_959, 262_143, 1_000_000], device=device)
    frequencies = inverse_frequencies(1e6, 128, "default", {}).to(device)
    made = _implementation(tables, "triton", "rope_table").function(
        positions, frequencies, torch.float32, interleaved
    )
    wanted = rope_table.reference(positions, frequencies, torch.float32, interleaved)
    torch.testing.assert_close(made.cos, wanted.cos, rtol=0, atol=2e-6)
    torch.testing.assert_close(made.sin, wanted.sin, rtol=0, atol=2e-6)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("shape", [(1, 1536), (33, 21_888), (5, 14)])
def test_activations(
    library: str,
    dtype: torch.dtype,
    name: str,
    shape: tuple[int, int],
    device: torch.device,
    tables: dict[str, Any],
) -> None:
    _compare(tables, library, name, lambda: (_random(device, dtype, *shape),), dtype)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_append_kv(
    library: str, dtype: torch.dtype, rows: int, device: torch.device, tables: dict[str, Any]
) -> None:
    def arguments() -> tuple[Any, ...]:
        fused = _random(device, dtype, rows, 40, 128)
        slots = torch.zeros(1000, 8, 128, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(3)
        mapping = torch.randperm(1000, generator=generator, device=device)[:rows]
        return slots, fused[:, 32:36], fused[:, 36:], mapping

    _compare(tables, library, "append_kv", arguments, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_kv_in_fp8(dtype: torch.dtype, device: torch.device, tables: dict[str, Any]) -> None:
    """The same bytes as torch writes, clipped instead of overflowing."""
    append = _implementation(tables, "triton", "append_kv").function
    rows = _random(device, dtype, 33, 8, 128) * 100
    rows[0, 0, 0], rows[1, 7, 1] = 60_000.0, -60_000.0
    mapping = torch.arange(33, device=device) * 3
    written = [torch.zeros(100, 8, 128, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    append(written[0], rows[:, :4], rows[:, 4:], mapping, 0.5, 2.0)
    BY_NAME["append_kv"].reference(written[1], rows[:, :4], rows[:, 4:], mapping, 0.5, 2.0)
    assert torch.equal(written[0].view(torch.uint8), written[1].view(torch.uint8))


ROUTERS = {
    "qwen3_moe": RouterConfig(128, 8, "softmax", post="renormalize"),
    "glm4_moe": RouterConfig(
        160, 8, "sigmoid", True, post="renormalize", renormalize_epsilon=1e-20, scale=2.5
    ),
    "deepseek_v3": RouterConfig(256, 8, "sigmoid", True, 8, 4, "top2_sum", "renormalize", 1e-20, 2.5),
    "deepseek_v2": RouterConfig(160, 6, "softmax", False, 8, 3, "max", scale=16.0),
    "gpt_oss": RouterConfig(32, 4, "none", post="softmax"),
    "qwen3_next": RouterConfig(512, 10, "softmax", post="renormalize"),
}


@pytest.mark.parametrize("name", sorted(ROUTERS))
@pytest.mark.parametrize("rows", ROWS)
def test_routers(name: str, rows: int, device: torch.device, tables: dict[str, Any]) -> None:
    """Logits in float32, so that rounding makes no ties, which each side would settle its own way."""
    config = ROUTERS[name]
    bias = _random(device, torch.float32, config.num_experts, seed=1) if config.correction_bias else None

    def arguments() -> tuple[Any, ...]:
        return _random(device, torch.float32, rows, config.num_experts), bias, config

    _compare(tables, "triton", "route", arguments, torch.float32)


def test_rows_of_padding_choose_no_expert(device: torch.device, tables: dict[str, Any]) -> None:
    route = _implementation(tables, "triton", "route").function
    logits = _random(device, torch.float32, 8, 128)
    valid = torch.arange(8, device=device) < 5
    weights, ids = route(logits, None, ROUTERS["qwen3_moe"], valid)
    assert torch.equal(ids[:5], route(logits[:5], None, ROUTERS["qwen3_moe"])[1])
    assert (ids[5:] == -1).all()
    assert weights.isfinite().all()


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("size", [7, 4096, 151_936])
def test_greedy_choice(rows: int, size: int, device: torch.device, tables: dict[str, Any]) -> None:
    choose = _implementation(tables, "triton", "argmax_and_finite").function
    logits = _random(device, torch.float32, rows, size)
    logits[0, [size // 2, size // 3]] = 50.0
    logits[-1, size - 1] = float("nan")
    ids, finite = choose(logits)
    assert finite.tolist() == [True] * (rows - 1) + [False]
    assert ids[:-1].tolist() == logits[:-1].cpu().argmax(-1).tolist()
    assert 0 <= int(ids[-1]) < size


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("size", [7, 151_936, 201_088])
def test_masks(rows: int, size: int, device: torch.device, tables: dict[str, Any]) -> None:
    """Masks are the reference's on the host, for rows in any order; rows without a mask stay."""
    mask = _implementation(tables, "triton", "mask_logits").function
    logits = _random(device, torch.float32, rows + 1, size)
    words = torch.randint(-(2**31), 2**31, (rows, -(-size // 32)), dtype=torch.int32)
    order = torch.randperm(rows + 1)[:rows]
    expected = logits.cpu()
    mask_logits.reference(expected, order, words)
    mask(logits, order.to(device), words.to(device))
    assert torch.equal(logits.cpu(), expected)


@pytest.mark.parametrize("size", [500, 151_936])
def test_truncation_keeps_the_same_tokens(size: int, device: torch.device, tables: dict[str, Any]) -> None:
    """Only tokens at the edge may differ: their share is within rounding of the threshold, or they tie."""
    truncate = _implementation(tables, "flashinfer", "truncate_probabilities").function
    probabilities = (_random(device, torch.float32, 6, size) * 3).softmax(-1)
    top_k = torch.tensor([0, 1, 20, 0, 40, 3], device=device)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 0.01], device=device, dtype=torch.float64)
    wanted = truncate_probabilities.reference(probabilities, top_k, top_p)
    kept = truncate(probabilities, top_k, top_p)
    assert torch.equal(kept[kept > 0], probabilities[kept > 0])
    assert ((kept > 0) ^ (wanted > 0)).sum(-1).max() <= 1
    assert torch.equal(kept[0], probabilities[0])
    assert (kept[1] > 0).sum() == (kept[5] > 0).sum() == 1


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_installed_can_be_captured(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """A graph of all ops replays what they gave eagerly; none waits for the host or copies from it."""
    chosen = install(device, backend, dtype)
    assert set(chosen) == set(BY_NAME)
    for op in OPS:
        maker = example(op, device, dtype)
        eager = op(*maker())
        static = maker()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            op(*maker())
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = op(*static)
        for tensor, fresh in zip(static, maker(), strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize(device)
        got, wanted = (value if isinstance(value, tuple) else (value,) for value in (recorded, eager))
        for tensor, expected in zip(got, wanted, strict=True):
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(tensor, expected), op.name
