"""Invariant: a dense layer kept in its checkpoint's format computes what its dequantised weights do, at every
instruction-set level, whatever the formats of its parts and the number and place of its rows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_service.ops.packed_weight import PackedPart, PackedWeight, packed_bytes
from moebius import _kernels
from moebius.kernels import supported_isas
from tests.helpers.panel_weights import COLUMNS, FORMATS, encoded, relative_error
from tests.helpers.quantised_sources import Quantised
from tests.tolerances import GEMM_BFLOAT16, GEMM_FLOAT32, GEMM_SPLIT


def aligned(size: int) -> torch.Tensor:
    """Zeros, uint8 `[size]`, at a multiple of 64 bytes."""
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64
    return memory[begin : begin + size]


def packed(isa: str, sources: list[Quantised]) -> PackedWeight:
    parts = tuple(PackedPart(source.format, len(source.weights)) for source in sources)
    columns = sources[0].weights.shape[1]
    threads = _kernels.DenseThreads(2, isa)
    weight = PackedWeight(threads, columns, parts, aligned(packed_bytes(columns, parts)))
    for number, source in enumerate(sources):
        rows = len(source.weights)
        # In two pieces, as a loader packs a large part.
        for begin, end in ((0, 32), (32, rows)):
            weight.pack(number, begin, source.source.take_rows(begin, end))
    weight.calibrate()
    return weight


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_dequantised_weights(name: str, isa: str) -> None:
    """Rows in either type, few and many, next to one another and apart; with a bias."""
    sources = encoded(name, "int8_g32_f16")
    weight = packed(isa, sources)
    meant = torch.from_numpy(np.concatenate([source.weights for source in sources])).double()
    torch.manual_seed(len(name))
    bias = torch.randn(len(meant))
    for rows in (1, 5, 40):
        wide = torch.randn(rows, COLUMNS + 24)
        for dtype, allowed in (
            (torch.float32, GEMM_FLOAT32),
            (torch.bfloat16, max(GEMM_BFLOAT16, GEMM_SPLIT)),
        ):
            given = wide.to(dtype)[:, 24:]
            expected = given.double() @ meant.T + bias.double()
            assert relative_error(weight.linear(given, bias, torch.float32), expected) <= allowed
            rounded = weight.linear(given.contiguous(), bias)
            assert rounded.dtype == dtype
            torch.testing.assert_close(rounded.double(), expected, rtol=8e-3, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_dequantised_weights(name: str) -> None:
    """An embedding's look-up, of both parts and of an id that there is not."""
    sources = encoded(name, FORMATS[0])
    weight = packed("auto", sources)
    meant = torch.from_numpy(np.concatenate([source.weights for source in sources]))
    ids = torch.tensor([0, 15, 16, 71, 72, 111, 112])
    found = weight.take_rows(ids, torch.float32)
    torch.testing.assert_close(found[:-1], meant[ids[:-1]], rtol=1e-6, atol=0)
    assert not found[-1].any()
    torch.testing.assert_close(weight.take_rows(ids, torch.bfloat16), found.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_those_beside_it(dtype: torch.dtype) -> None:
    """Not a bit of a float32 row changes: which kernel computes it depends on nothing that is measured."""
    weight = packed("auto", encoded("int8_g32_f16"))
    rows = torch.randn(33, COLUMNS).to(dtype)
    together = weight.linear(rows, None, torch.float32)
    alone = torch.cat([weight.linear(row[None], None, torch.float32) for row in rows])
    exact = 0.0 if dtype == torch.float32 else 1e-4
    torch.testing.assert_close(together, alone, rtol=exact, atol=exact)


def test_what_does_not_fit_is_refused() -> None:
    """A format whose rows are quantised, memory of another size, rows beyond the part's last."""
    threads = _kernels.DenseThreads(1)
    parts = (PackedPart("int8_w8a8", 16),)
    with pytest.raises(ValueError, match="rows quantised"):
        PackedWeight(threads, 64, parts, aligned(packed_bytes(64, parts)))
    parts = (PackedPart("int8_g32_f16", 16),)
    with pytest.raises(ValueError, match="memory has 64 bytes"):
        PackedWeight(threads, 64, parts, aligned(64))
    (source,) = encoded(FORMATS[0])
    weight = packed("auto", [source])
    with pytest.raises(ValueError, match="do not fit a part of 72 rows"):
        weight.pack(0, 16, source.source)
