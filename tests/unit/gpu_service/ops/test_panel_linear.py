"""Invariant: a dense layer that a GPU keeps in packed panels computes what its dequantised weights do.

Kernels run in Triton's interpreter; tests/gpu/test_panel_linear_gpu.py repeats this on a device.
"""

from __future__ import annotations

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.ops import panel_linear as reference
from gpu_service.ops.triton import panel_linear as kernels
from tests.helpers.panel_weights import FORMATS, PART_ROWS, encoded, panel_weight, relative_error
from tests.tolerances import GEMM_FLOAT32, RESIDENT_FLOAT16

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")
# Row kernels with one row and several, then tiles.
ROWS = (1, 3, 5)
OTHER = "int8_g32_f16"
# Of each way to store codes and scales one.
COVERING = (
    "fp8_block",
    "awq_int4_g64",
    "int4_g32_mins_products",
    "int6_g16_products",
    "iq3_s_grid_products",
    "iq3_xxs_grid_products",
    "iq2_s_grid_products",
    "iq1_m_grid_products",
    "iq1_s_grid_products",
    "tq1_products",
    "int3_g16_products",
    "nvfp4",
)
ALL = [pytest.param(name, marks=[] if name in COVERING else pytest.mark.full) for name in FORMATS]


@pytest.mark.parametrize("name", ALL)
def test_products_are_those_of_the_dequantised_weights(name: str) -> None:
    """Two parts in different formats whose rows fill no panel, strided rows, a bias."""
    sources = encoded(name, OTHER)
    weight = panel_weight(sources)
    meant = torch.cat([torch.from_numpy(source.weights) for source in sources]).double()
    columns = meant.shape[1]
    torch.manual_seed(len(name))
    bias = torch.randn(len(meant))
    wide = torch.randn(max(ROWS), columns + 24)
    for rows in ROWS:
        given = wide[:rows, 24:]
        expected = given.double() @ meant.T + bias.double()
        found = kernels.panel_linear(given, weight.memory, weight.parts, bias)
        assert relative_error(found, expected) <= GEMM_FLOAT32
        plain = reference.panel_linear.reference(given, weight.memory, weight.parts, bias)
        assert relative_error(plain, expected) <= GEMM_FLOAT32


@pytest.mark.parametrize("name", ALL)
def test_rows_are_the_dequantised_weights(name: str) -> None:
    """An embedding's look-up, of both parts and of ids that there are not."""
    sources = encoded(name, OTHER)
    weight = panel_weight(sources)
    meant = torch.cat([torch.from_numpy(source.weights) for source in sources])
    last = sum(PART_ROWS)
    ids = torch.tensor([0, 15, 16, PART_ROWS[0] - 1, PART_ROWS[0], last - 1, last, -1])
    for take in (kernels.panel_rows, reference.panel_rows.reference):
        found = take(ids, weight.memory, weight.parts, torch.float32)
        torch.testing.assert_close(found[:-2], meant[ids[:-2]], rtol=1e-6, atol=0)
        assert not found[-2:].any()


@pytest.mark.parametrize("name", ["int4_g32_mins_products", "int6_g16_products", "fp8_channel", "nvfp4"])
def test_many_rows_meet_weights_that_are_unpacked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some panels at a time, the last of which are fewer; scales of whole columns are part of the values."""
    sources = encoded(name, OTHER)
    weight = panel_weight(sources)
    monkeypatch.setattr(kernels, "UNPACK_FROM_ROWS", 6)
    monkeypatch.setattr(kernels, "panels_at_once", lambda panels, item: 2)
    meant = torch.cat([torch.from_numpy(source.weights) for source in sources]).double()
    given = torch.randn(9, meant.shape[1]).half()
    for bias in (None, torch.randn(len(meant)).half()):
        expected = given.double() @ meant.T + (0 if bias is None else bias.double())
        found = kernels.panel_linear(given, weight.memory, weight.parts, bias)
        assert found.dtype == torch.float16
        assert relative_error(found, expected) <= RESIDENT_FLOAT16


def test_what_does_not_fit_is_refused() -> None:
    """Rows beyond the part's last, and rows that begin inside of a panel."""
    (source,) = encoded(FORMATS[0])
    weight = panel_weight([source])
    for first in (16, 8):
        with pytest.raises(ValueError, match=f"rows from {first} on do not fit a part of 72 rows"):
            weight.pack(0, first, source.source)
