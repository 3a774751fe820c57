"""Invariant: sparse attention differs from transformers' only in rows that choose among equal scores, or read
such a row.

A query attends to the tokens, or entries, of the highest index scores. Which of several equal scores are the
last to be chosen is left open by `torch.topk`; here the earliest are. Scores of float32 that differ in their
last bits fall either way as well, so that a long prompt has some rows of this kind, and all rows that attend
to one of them in a later layer differ a little.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.attention.compressed import torch_reference as compressed_reference
from gpu_service.attention.mla import torch_reference
from gpu_service.attention.mla.torch_reference import select_tokens
from tests.helpers.gguf_models import reference_logits
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

PAGE_SIZE = 64
# Units in the last place of a row's largest score: sums over heads round that much, in whatever order.
ULPS = 32


class Choices:
    """Takes what transformers chose in place of our choice, and measures how much worse it is."""

    def __init__(self, theirs: list[torch.Tensor]) -> None:
        self.theirs = theirs
        self.num_taken = 0  # rows of the first one: long prompts are computed in blocks of rows
        # Of choices that differ: distance from the last chosen score, in ULPs of the row's largest.
        self.gaps: list[float] = []
        self.differing: set[int] = set()

    def __call__(self, scores: torch.Tensor, lengths: torch.Tensor, top_k: int) -> torch.Tensor:
        """Selects as `select_tokens`."""
        own = self._mask(select_tokens(scores, lengths, top_k), scores)
        visible = torch.arange(scores.shape[1]) < lengths[:, None]
        first = self.num_taken
        their = self._mask(self._next_rows(scores.shape[0]), scores) & visible
        assert torch.equal(own.sum(1), their.sum(1)), "as many are chosen"
        last = scores.masked_fill(~own, float("inf")).amin(1, keepdim=True)
        unit = torch.finfo(torch.float32).eps * scores.masked_fill(~visible, 0).abs().amax(1, keepdim=True)
        differs = own != their
        self.gaps += ((scores - last).abs() / unit.clamp(min=1e-30))[differs].tolist()
        self.differing |= set((first + torch.where(differs.any(1))[0]).tolist())
        chosen = torch.full((scores.shape[0], top_k), -1, dtype=torch.int32)
        for row, picked in enumerate(their):
            places = torch.where(picked)[0]
            chosen[row, : len(places)] = places.to(torch.int32)
        return chosen

    def _next_rows(self, count: int) -> torch.Tensor:
        """Returns what transformers chose for the next rows of the layer under way."""
        rows = self.theirs[0][self.num_taken : self.num_taken + count]
        self.num_taken += count
        if self.num_taken == len(self.theirs[0]):
            self.theirs.pop(0)
            self.num_taken = 0
        return rows

    @staticmethod
    def _mask(chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns the columns that are chosen; those after a block's last visible one count as not chosen."""
        num_columns = scores.shape[1]
        mask = torch.zeros(scores.shape[0], num_columns + 1, dtype=torch.bool)
        columns = torch.where((chosen < 0) | (chosen >= num_columns), num_columns, chosen).long()
        return mask.scatter_(1, columns, True)[:, :-1]


def indexers_of(model: Any) -> list[Any]:
    """Returns the modules that choose, in order of layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("Indexer")]


@pytest.mark.parametrize(
    ("num_heads", "num_tokens"), [(1, 300), (16, 300), pytest.param(4, 8000, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_rows_differ_where_scores_are_equal(
    name: str, num_heads: int, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few heads all of a row's products may be negative and score 0: it chooses among equals."""
    tiny = TINY_MODELS[name]
    tiny = replace(
        tiny, changes=tiny.changes | {"index_n_heads": num_heads, "max_position_embeddings": 2**14}
    )
    reference = write_tiny_model(tiny, tmp_path, seed=3)
    tokens = torch.randint(3, 200, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs: list[torch.Tensor] = []
    for module in indexers_of(reference):
        module.register_forward_hook(lambda *call: theirs.append(call[-1][0]))
    expected = reference_logits(reference, tokens)
    _, own_logits = load_runner(tmp_path, page_size=PAGE_SIZE).prefill(tokens)

    choices = Choices(theirs)
    monkeypatch.setattr(torch_reference, "select_tokens", choices)
    monkeypatch.setattr(compressed_reference, "select_tokens", choices)
    _, logits = load_runner(tmp_path, page_size=PAGE_SIZE).prefill(tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
    assert all(gap <= ULPS for gap in choices.gaps), f"another choice is worse by {max(choices.gaps)} ULPs"
    assert bool(choices.differing) is (num_heads < 16)
    first = min(choices.differing, default=num_tokens)
    torch.testing.assert_close(
        own_logits[:first], expected[:first], rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS
    )
