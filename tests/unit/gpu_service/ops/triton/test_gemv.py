"""Invariant: products of few rows are the torch reference, also with the norm before and the choice after.

Here the kernels run in Triton's interpreter; tests/gpu/test_fused_gpu.py runs them compiled.
"""

from __future__ import annotations

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.ops import linear
from gpu_service.ops.triton import gemv, norm_route
from moebius.models.layers.router import RouterConfig
from tests.tolerances import OP_ROUNDINGS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "features"), [(1, 64, 16), (1, 40, 5000), (2, 40, 1200), (4, 130, 3)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(dtype: torch.dtype, rows: int, columns: int, features: int, has_bias: bool) -> None:
    """Sizes that fill no block, and several features a program; rows inside of wider ones."""
    torch.manual_seed(columns)
    x = torch.randn(rows, columns + 8).to(dtype)[:, 8:]
    weight = torch.randn(features, columns).to(dtype)
    bias = torch.randn(features).to(dtype) if has_bias else None
    assert gemv.can_linear(x, weight, bias)
    expected = linear.linear.reference(x, weight, bias)
    tolerance = OP_ROUNDINGS[dtype]
    torch.testing.assert_close(gemv.linear(x, weight, bias), expected, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("update_dtype", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["narrow", "float32"])
def test_add_norm_linear(
    dtype: torch.dtype, update_dtype: torch.dtype | None, weight_dtype: torch.dtype | None
) -> None:
    """The sum is exact, the norm rounded as the norm's op says; a router's weight may be wider."""
    torch.manual_seed(3)
    residual = torch.randn(3, 96).to(dtype)
    update = None if update_dtype is None else torch.randn(3, 96).to(update_dtype)
    norm_weight, bias = torch.randn(96).to(dtype), torch.randn(20).to(weight_dtype or dtype)
    weight = torch.randn(20, 96).to(weight_dtype or dtype)
    arguments = norm_weight, 1e-6, weight, bias
    wanted = linear.add_norm_linear.reference(
        residual.clone(), None if update is None else update.clone(), *arguments
    )
    before = residual.clone()
    found = gemv.add_norm_linear(residual, update, *arguments)
    assert torch.equal(found[0], wanted[0])
    # Other programs may still read it.
    assert torch.equal(residual, before)
    tolerance = OP_ROUNDINGS[dtype]
    torch.testing.assert_close(found[1], wanted[1], rtol=tolerance, atol=tolerance)
    assert found[2].dtype == wanted[2].dtype
    torch.testing.assert_close(found[2], wanted[2], rtol=tolerance, atol=32 * tolerance)


@pytest.mark.parametrize(
    ("score", "features", "rows"),
    [
        ("softmax", 16, 1),
        ("sigmoid", 16, 1),
        ("sigmoid", 600, 3),
        pytest.param("softmax", 600, 3, marks=pytest.mark.full),
    ],
)
def test_add_norm_route(score: str, features: int, rows: int) -> None:
    """One launch or several, a choice is the same; the counter is ready for the next launch."""
    torch.manual_seed(rows)
    config = RouterConfig(features, 4, score, num_groups=4, top_groups=2, post="renormalize", scale=2.5)
    residual, update = torch.randn(rows, 64), torch.randn(rows, 64)
    weight, correction = torch.randn(features, 64), torch.randn(features) * 0.1
    valid = torch.arange(rows) != 1
    arguments = torch.randn(64), 1e-6, weight, None, correction, config, valid
    wanted = linear.add_norm_route.reference(residual.clone(), update.clone(), *arguments)
    assert norm_route.can_add_norm_route(residual, update, *arguments)
    for _ in range(2):
        total, normed, weights, ids = norm_route.add_norm_route(residual, update, *arguments)
        torch.testing.assert_close((total, normed), wanted[:2], rtol=1e-5, atol=1e-5)
        order, wanted_order = ids.argsort(dim=1), wanted[3].argsort(dim=1)
        assert torch.equal(ids.gather(1, order), wanted[3].gather(1, wanted_order))
        found = weights.gather(1, order)[valid]
        torch.testing.assert_close(found, wanted[2].gather(1, wanted_order)[valid], rtol=1e-4, atol=1e-5)


def test_a_float32_row_is_multiplied_in_float32() -> None:
    """Not in the tensor cores' shorter form: one part in a million decides here."""
    x = torch.tensor([[1.0, 1.0 + 2**-20] + [0.0] * 30])
    weight = torch.zeros(4, 32)
    weight[2, 0], weight[2, 1] = -1.0, 1.0
    assert gemv.linear(x, weight, None).tolist() == [[0.0, 0.0, 2**-20, 0.0]]


@pytest.mark.parametrize("rows", [0, gemv.MAX_ROWS + 1])
def test_other_products_are_left_to_others(rows: int) -> None:
    """More rows, none, wide ones, and weights of another type or layout."""
    weight = torch.zeros(8, 32)
    assert not gemv.can_linear(torch.zeros(rows, 32), weight, None)
    x = torch.zeros(1, 32)
    assert gemv.can_linear(x, weight, None)
    # Several rows only where a program has few features.
    assert gemv.can_linear(torch.zeros(4, 32), weight, None)
    assert not gemv.can_linear(torch.zeros(2, 32), torch.zeros(5000, 32), None)
    assert not gemv.can_linear(x, weight.half(), None)
    assert not gemv.can_linear(x, torch.zeros(32, 8).t(), None)
    assert not gemv.can_linear(
        torch.zeros(1, 2 * gemv.MAX_COLUMNS), torch.zeros(1, 2 * gemv.MAX_COLUMNS), None
    )


def test_few_features_are_spread_over_the_processors() -> None:
    """A router of 128 experts takes 128 programs, a wide projection tiles of the largest size, and the weight
    of logits, without a norm, tiles whose sums fit into registers."""
    assert gemv.features_per_program(128, 4096) == 1
    assert gemv.features_per_program(5120, 4096) == 16
    assert gemv.features_per_program(2048, 8192) == 8
    assert gemv.features_per_program(5120, 16384) == 4
    assert gemv.features_per_program(151936, 4096, gemv.MAX_PLAIN_FEATURES) == 8
