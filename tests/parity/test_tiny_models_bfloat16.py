"""Invariant: in bfloat16 and in float16 we lose no more precision than transformers does, on every family.

16-bit logits of two implementations cannot be compared with each other (roundings differ), but the
distance of each to the float32 model can.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import pytest
import torch

from moebius.models.config import ModelOverrides
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import TINY_MODELS, attending_to_all, write_tiny_model
from tests.tolerances import HALF_ERROR_RATIO

PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15]


# Of each family in bfloat16 one is in `make test`, of all in float16 this one: the code is the same.
IN_FLOAT16 = "qwen3_moe"


@pytest.mark.covering(1, name=lambda name: TINY_MODELS[name].model_type)
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_bfloat16_error_is_not_above_transformers_own(name: str, tmp_path: Path) -> None:
    """Mean distances of all logits."""
    _check(name, "bfloat16", tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == IN_FLOAT16 else pytest.mark.full)
        for name in sorted(TINY_MODELS)
    ],
)
def test_float16_error_is_not_above_transformers_own(name: str, tmp_path: Path) -> None:
    """Its eighth of bfloat16's steps is used: a product that went through bfloat16 would exceed this."""
    _check(name, "float16", tmp_path)


def _check(name: str, dtype: Literal["bfloat16", "float16"], tmp_path: Path) -> None:
    reference = write_tiny_model(attending_to_all(name, len(PROMPT)), tmp_path, seed=sum(name.encode()))
    half = copy.deepcopy(reference).to(getattr(torch, dtype))
    # The grouped product transformers prefers does not accept these odd widths in 16 bits.
    half.config._experts_implementation = "eager"
    with torch.inference_mode():
        exact = reference(torch.tensor([PROMPT])).logits[0]
        theirs = half(torch.tensor([PROMPT])).logits[0].float()
    _, ours = load_runner(tmp_path, overrides=ModelOverrides(dtype=dtype)).prefill(PROMPT)
    assert ours.dtype == torch.float32
    limit = HALF_ERROR_RATIO * (theirs - exact).abs().mean()
    assert (ours - exact).abs().mean() <= limit
