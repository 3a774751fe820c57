"""Invariant: attention of a prompt's rows is softmax over exactly what each row sees, at every
instruction-set level, and a row's bits depend on no other row, on threads, or on positions that nothing sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from moebius import _kernels
from moebius.kernels import supported_isas

LEVELS = pytest.mark.parametrize(
    "isa", [isa for isa in supported_isas() if isa in ("scalar", "avx2", "avx512")]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
PAGE = 16


@dataclass(frozen=True)
class Case:
    """One request whose last `rows` tokens are computed; a window hides earlier positions."""

    rows: int
    past: int
    kv_heads: int
    group: int
    head_dim: int
    window: int = 1 << 20


# Rows below, at and above a tile's lanes; lengths around the blocks of 64 positions.
CASES = (
    Case(13, 0, 3, 3, 64),
    Case(64, 64, 1, 4, 16),
    Case(70, 200, 2, 1, 128, window=50),
    Case(97, 5, 1, 9, 80),
)


class Prompt:
    """Tensors of a case, pages in a drawn order; slots that hold no position of it are NaN."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, length = case, case.rows + case.past
        pages = -(-length // PAGE)
        self.heads = case.kv_heads * case.group
        self.pages = torch.full((pages + 2, PAGE, 2 * case.kv_heads, case.head_dim), math.nan, dtype=dtype)
        self.table = (torch.randperm(pages + 1)[:pages] + 1).int()
        self.cached = torch.randn(length, 2 * case.kv_heads, case.head_dim).to(dtype)
        for position, stored in enumerate(self.cached):
            self.pages[self.table[position // PAGE], position % PAGE] = stored
        self.query = torch.randn(case.rows, self.heads, case.head_dim).to(dtype)
        self.sinks = torch.randn(self.heads)
        positions = torch.arange(case.past, length)
        self.ends = (positions + 1).int()
        self.begins = (positions + 1 - case.window).clamp(min=0).int()

    def attend(self, isa: str, threads: int, rows: slice) -> torch.Tensor:
        """What the kernels say of some rows."""
        query, begins, ends = self.query[rows], self.begins[rows].clone(), self.ends[rows].clone()
        output, requests = torch.empty_like(query), torch.zeros_like(begins)
        _kernels.DenseThreads(threads, isa).attend(
            *(query.dtype == torch.bfloat16, query.data_ptr(), query.stride(0), self.pages.data_ptr(), PAGE),
            *(self.table.data_ptr(), self.table.shape[0], requests.data_ptr(), begins.data_ptr()),
            *(ends.data_ptr(), self.sinks.data_ptr(), output.data_ptr(), 0.3, query.shape[0], self.heads),
            *(self.case.kv_heads, self.case.head_dim, True),
        )
        return output

    def expected(self) -> torch.Tensor:
        """The softmax's definition in float64, all rows."""
        key, value = (
            part.double().repeat_interleave(self.case.group, dim=1) for part in self.cached.chunk(2, dim=1)
        )
        scores = torch.einsum("nhd,thd->hnt", self.query.double(), key) * 0.3
        position = torch.arange(self.cached.shape[0])
        seen = (position >= self.begins[:, None]) & (position < self.ends[:, None])
        scores = scores.masked_fill(~seen, -math.inf)
        sinks = self.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat((scores, sinks), dim=2).softmax(2)[:, :, :-1]
        return torch.einsum("hnt,thd->nhd", weights, value)


@LEVELS
@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_rows_are_softmax_over_what_they_see(isa: str, dtype: torch.dtype, case: Case) -> None:
    """With sinks, windows, and pages whose unused slots are NaN."""
    prompt = Prompt(case, dtype)
    allowed = 2e-5 if dtype == torch.float32 else 8e-3
    found = prompt.attend(isa, 2, slice(None)).double()
    torch.testing.assert_close(found, prompt.expected(), rtol=0, atol=allowed)


@LEVELS
def test_a_rows_bits_depend_on_no_other_row(isa: str) -> None:
    """A prompt in one piece and in uneven ones, by one thread and by three."""
    for case in CASES:
        prompt = Prompt(case, torch.float32)
        whole = prompt.attend(isa, 1, slice(None))
        cut = case.rows // 3 + 1
        pieces = [prompt.attend(isa, 3, rows) for rows in (slice(0, cut), slice(cut, None))]
        assert torch.equal(whole, torch.cat(pieces))


def test_scores_beyond_the_exponentials_range_stay_finite() -> None:
    """The largest score decides alone, wherever it lies."""
    prompt = Prompt(CASES[0], torch.float32)
    prompt.query *= 1e4
    for isa in supported_isas():
        if isa in ("scalar", "avx2", "avx512"):
            found = prompt.attend(isa, 1, slice(None)).double()
            torch.testing.assert_close(found, prompt.expected(), rtol=1e-3, atol=1e-3)
