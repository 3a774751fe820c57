"""Invariant: where a GPU has no 8-bit floats, their bytes mean the same: codes, caches, weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.mla.triton_backend import TritonMlaAttention
from gpu_service.attention.triton_backend import TritonAttention
from gpu_service.cache.fp8 import E4M3, E4M3_MAX
from gpu_service.device import limits
from gpu_service.ops.examples import example
from gpu_service.ops.triton.e4m3 import as_loadable
from gpu_service.ops.triton.kv import append_kv
from gpu_service.ops.triton.linear import fp8_linear
from tests.helpers.attention_cases import Geometry, make_case, run
from tests.helpers.mla_cases import TINY, make_mla_case, run_absorbed

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")


@pytest.fixture
def _ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WITHOUT_GPU", replace(limits.WITHOUT_GPU, architecture=86))


def _stored(values: torch.Tensor, key_scale: float = 1.0) -> torch.Tensor:
    """Returns the bytes that the kernel stores of float32 keys, one head of 16 a token."""
    rows = values.view(-1, 1, 16)
    slots = torch.zeros(rows.shape[0], 2, 16).to(E4M3)
    append_kv(slots, rows, rows, torch.arange(rows.shape[0]), key_scale, 1.0)
    return slots[:, 0].reshape(-1).view(torch.uint8)


@pytest.mark.usefixtures("_ampere")
def test_every_value_is_stored_as_torch_rounds_it() -> None:
    """Ties, the smallest codes and below, both zeros, the largest value and beyond, NaN; infinity is NaN, so
    that an overflow stays seen."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = codes[codes.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    near = torch.cat((ties.nextafter(ties + 1), ties.nextafter(ties - 1)))
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 2.0**-10, 500.0, -1e30, float("inf"), float("-inf")])
    values = torch.cat((finite, ties, near, special, torch.randn(1000) * 30))
    values = torch.cat((values, torch.full((-len(values) % 16,), float("nan"))))
    for scale in (1.0, 3.0):
        clipped = (values / scale).clamp(-E4M3_MAX, E4M3_MAX)
        expected = torch.where(values.isinf(), values * float("nan"), clipped).to(E4M3)
        assert torch.equal(_stored(values, scale), expected.view(torch.uint8))


@pytest.mark.usefixtures("_ampere")
def test_every_code_is_read_as_torch_reads_it() -> None:
    """A product with ones in one column gives each code's value back; NaN codes stay NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    weight = torch.zeros(256, 128).to(E4M3)
    weight[:, 5] = codes.float().to(E4M3)
    assert as_loadable(weight).dtype == torch.uint8
    row = torch.zeros(1, 128)
    row[0, 5] = 1.0
    got = fp8_linear(row, weight, torch.ones(256, 1), 0, None)[0]
    torch.testing.assert_close(got, codes.float(), rtol=0, atol=0, equal_nan=True)


def _results() -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    for shape in ([(9, 1), (40, 1)], [(9, 1), (4, 20)]):
        geometry = Geometry(storage_dtype=E4M3)
        case: Any = make_case(geometry, shape)
        results.append(run(case, TritonAttention(geometry.config().layers, case.cache, min_split=16)))
        latent = make_mla_case(TINY, shape, storage_dtype=E4M3)
        results.append(run_absorbed(latent, TritonMlaAttention(TINY, latent.cache, min_split=16)))
    results.append(fp8_linear(*example("fp8_linear", CPU, torch.float32)))
    return results


def test_attention_and_products_do_not_depend_on_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: the same values reach the same products."""
    expected = _results()
    monkeypatch.setattr(limits, "WITHOUT_GPU", replace(limits.WITHOUT_GPU, architecture=80))
    for got, wanted in zip(_results(), expected, strict=True):
        assert torch.equal(got, wanted)
