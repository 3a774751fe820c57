"""Invariant: fused kernels of a decode step are the unfused ops on the same GPU, at the sizes of real models.

Of Qwen3-30B-A3B, GLM-4.5-Air and gpt-oss-120b, with rows up to the last that a product of few rows takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_service.experts.resident.experts import TorchResidentKernels
from gpu_service.experts.resident.make import make_kernels
from gpu_service.ops import kv, linear
from gpu_service.ops.registry import Implementation
from gpu_service.ops.rope import rope_table
from gpu_service.ops.rope_frequencies import inverse_frequencies
from moebius.models.layers.router import RouterConfig
from tests import tolerances
from tests.helpers.ops import assert_same_op
from tests.helpers.resident_layers import Shape, resident_layer, routed

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Features and columns: queries, keys and values; outputs; a router; a width that is no power of two.
PRODUCTS = [(5120, 2048), (2048, 4096), (128, 2048), (5120, 2880), (4096, 8192)]


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _triton(op: str) -> Implementation:
    from gpu_service.ops.triton.table import IMPLEMENTATIONS

    return IMPLEMENTATIONS[op]


def _random(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _compare(op: Any, arguments: Callable[[], tuple[Any, ...]], dtype: torch.dtype) -> None:
    implementation = _triton(op.name)
    if implementation.supports is not None and not implementation.supports(*arguments()):
        pytest.skip(f"{op.name} leaves these arguments to separate kernels")
    assert_same_op(op, implementation.function, arguments, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), PRODUCTS)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_products_of_few_rows(
    rows: int, features: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    def arguments() -> tuple[Any, ...]:
        weight = _random(device, dtype, features, columns, seed=1) * columns**-0.5
        return _random(device, dtype, rows, columns), weight, _random(device, dtype, features, seed=2)

    _compare(linear.linear, arguments, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), PRODUCTS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("update_dtype", [None, torch.float32], ids=str)
def test_addition_norm_and_product(
    rows: int,
    features: int,
    columns: int,
    dtype: torch.dtype,
    update_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """The kernel is right as after experts, whose sum is float32, and at the beginning, where nothing is
    added.
    """

    def arguments() -> tuple[Any, ...]:
        residual = _random(device, dtype, rows, columns)
        update = None if update_dtype is None else _random(device, update_dtype, rows, columns, seed=1)
        weight = _random(device, dtype, features, columns, seed=2) * columns**-0.5
        return residual, update, _random(device, dtype, columns, seed=3), 1e-6, weight, None

    _compare(linear.add_norm_linear, arguments, dtype)


def test_a_row_is_computed_alone(device: torch.device) -> None:
    """Bit for bit, whatever else is in the step."""
    rows, weight = _random(device, torch.bfloat16, 4, 2048), _random(device, torch.bfloat16, 256, 2048)
    product = _triton("linear").function
    together = product(rows, weight, None)
    for row in range(4):
        assert torch.equal(product(rows[row : row + 1], weight, None)[0], together[row])


@pytest.mark.parametrize("experts", [128, 512])
@pytest.mark.parametrize("rows", [1, 4])
def test_addition_norm_and_choice(rows: int, experts: int, device: torch.device) -> None:
    """In a graph that is replayed while another stream routes as well: each has its own counter."""
    config = RouterConfig(experts, 8, "softmax", post="renormalize")
    op = _triton("add_norm_route")
    weight, scale = _random(device, torch.float32, experts, 2048, seed=1) * 2048**-0.5, torch.ones(2048)
    scale = scale.to(device)

    def arguments(seed: int) -> tuple[Any, ...]:
        residual, update = _random(device, torch.float32, 2, rows, 2048, seed=seed)
        return residual, update, scale, 1e-6, weight, None, None, config, None

    given = [arguments(seed) for seed in range(2)]
    wanted = [linear.add_norm_route.reference(*arguments(seed)) for seed in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    graphs, found = [], []
    for stream, own in zip(streams, given, strict=True):
        with torch.cuda.stream(stream):
            assert op.supports is not None
            assert op.supports(*own)
            op.function(*own)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(50):
                    result = op.function(*own)
            graphs.append(graph)
            found.append(result)
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize(device)
    for got, expected in zip(found, wanted, strict=True):
        by_expert = [torch.zeros(rows, experts, device=device) for _ in range(2)]
        for target, (_, _, weights, ids) in zip(by_expert, (got, expected), strict=True):
            target.scatter_(1, ids.long(), weights)
        torch.testing.assert_close(by_expert[0], by_expert[1], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("storage", [None, torch.float8_e4m3fn], ids=["plain", "fp8"])
@pytest.mark.parametrize(("queries", "keys", "head_dim", "rotary"), [(32, 4, 128, 128), (96, 8, 128, 64)])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("tokens", [1, 600])
def test_rotation_and_storing(
    tokens: int,
    normed: bool,
    queries: int,
    keys: int,
    head_dim: int,
    rotary: int,
    storage: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    frequencies = inverse_frequencies(1e6, rotary, "default", {}).to(device)
    table = rope_table.reference(torch.arange(tokens, device=device) * 7, frequencies, dtype, False)

    def arguments() -> tuple[Any, ...]:
        fused = _random(device, dtype, tokens, queries + 2 * keys, head_dim)
        weights = _random(device, dtype, 2, head_dim, seed=1) if normed else (None, None)
        slots = torch.zeros(2 * tokens, 2 * keys, head_dim, device=device, dtype=dtype)
        mapping = 2 * torch.arange(tokens, device=device).flip(0) + 1
        heads, value = fused[:, : queries + keys], fused[:, queries + keys :]
        stored = slots.to(storage or dtype), mapping, *((0.5, 2.0) if storage else (1.0, 1.0))
        return heads, weights[0], weights[1], 1e-6, queries, table, value, *stored

    if storage is None:
        _compare(kv.rotate_and_append, arguments, dtype)
        return
    # What was rounded otherwise by one place may be the next of the few values of 8 bits.
    ours = arguments()
    _, key = _triton("rotate_and_append").function(*ours)
    theirs = arguments()
    kv.append_kv.reference(theirs[7], key, *theirs[6:7], *theirs[8:])
    assert torch.equal(ours[7].view(torch.uint8), theirs[7].view(torch.uint8))


@pytest.mark.parametrize("weight_format", ["int4_g32", "bfloat16", "mxfp4", "fp8_block"])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_down_and_sum_of_experts(weight_format: str, rows: int, device: torch.device) -> None:
    """Some choices are of no resident expert: what they would read counts for nothing."""
    shape = Shape(hidden=2048, intermediate=768, experts=64, top_k=8)
    slots = resident_layer(shape, weight_format, tuple(range(0, 64, 2)), "cuda")
    hidden_states, ids, weights = routed(shape, rows, device="cuda", dtype=torch.bfloat16)
    kernels = make_kernels(shape.geometry, device)
    partial = torch.randn(rows, shape.hidden, device=device)
    expected = TorchResidentKernels(shape.geometry).forward(slots, hidden_states, ids, weights, None)
    found = kernels.forward(slots, hidden_states, ids, weights, partial.clone()) - partial
    scale = expected.square().mean().sqrt()
    assert float((found - expected).square().mean().sqrt() / scale) < tolerances.RESIDENT_BFLOAT16
    again = kernels.forward(slots, hidden_states, ids, weights, partial.clone()) - partial
    assert torch.equal(found, again)
