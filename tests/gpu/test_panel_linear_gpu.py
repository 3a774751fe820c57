"""Dense layers in packed panels on a GPU: kernels against the dequantised weights, and in graphs."""

from __future__ import annotations

import pytest
import torch

from gpu_service.ops.triton import panel_linear as kernels
from tests.helpers.panel_weights import FORMATS, encoded, panel_weight, relative_error
from tests.tolerances import RESIDENT_BFLOAT16, RESIDENT_GPU_FLOAT32

pytestmark = pytest.mark.gpu
# The row kernels, tiles of either height, and weights that are unpacked; sizes that fill no tile.
ROWS = (1, 2, 4, 5, 16, 33, 200, 600)
COLUMNS, PART_ROWS = 2048, (520, 200)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_dequantised_weights(name: str, dtype: torch.dtype) -> None:
    """Two parts of different formats with a bias; weights are rounded once at most."""
    sources = encoded(name, "int8_g32_f16", columns=COLUMNS, rows=PART_ROWS)
    weight = panel_weight(sources, "cuda", dtype)
    meant = torch.cat([torch.from_numpy(source.weights) for source in sources]).double()
    bias = torch.randn(len(meant))
    allowed = RESIDENT_GPU_FLOAT32 if dtype == torch.float32 else RESIDENT_BFLOAT16
    for rows in ROWS:
        given = torch.randn(rows, COLUMNS).to(dtype)
        expected = given.double() @ meant.T + bias.to(dtype).double()
        found = kernels.panel_linear(given.cuda(), weight.memory, weight.parts, bias.to(dtype).cuda())
        assert relative_error(found, expected) <= allowed, rows


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_dequantised_weights(name: str) -> None:
    """An embedding's look-up."""
    sources = encoded(name, "int8_g32_f16", columns=COLUMNS, rows=PART_ROWS)
    weight = panel_weight(sources, "cuda")
    meant = torch.cat([torch.from_numpy(source.weights) for source in sources])
    ids = torch.tensor([0, 15, 16, 519, 520, 719, 720])
    found = kernels.panel_rows(ids.cuda(), weight.memory, weight.parts, torch.float32).cpu()
    torch.testing.assert_close(found[:-1], meant[ids[:-1]], rtol=1e-6, atol=0)
    assert not found[-1].any()


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_are_captured(rows: int) -> None:
    """A graph computes what is in its rows when it is replayed."""
    weight = panel_weight(encoded("int4_g32_mins_products", "int6_g16_products"), "cuda", torch.bfloat16)
    weight.calibrate()
    given = torch.zeros(rows, weight.in_features, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.panel_linear(given, weight.memory, weight.parts, None)
    given.copy_(torch.randn_like(given))
    graph.replay()
    assert torch.equal(found, kernels.panel_linear(given, weight.memory, weight.parts, None))
    assert found.any()
