"""Invariant: in bfloat16 we lose no more precision than transformers does, on every family.

bfloat16 logits of two implementations can not be compared with each other (roundings differ), but the
distance of each to the float32 model can.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from moebius.models.config import ModelOverrides
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import TINY_MODELS, attending_to_all, write_tiny_model
from tests.tolerances import BFLOAT16_ERROR_RATIO

PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15]


@pytest.mark.covering(1, name=lambda name: TINY_MODELS[name].model_type)
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_bfloat16_error_is_not_above_transformers_own(name: str, tmp_path: Path) -> None:
    reference = write_tiny_model(attending_to_all(name, len(PROMPT)), tmp_path, seed=sum(name.encode()))
    half = copy.deepcopy(reference).to(torch.bfloat16)
    # The grouped product transformers prefers does not accept these odd widths in bfloat16.
    half.config._experts_implementation = "eager"
    with torch.inference_mode():
        exact = reference(torch.tensor([PROMPT])).logits[0]
        theirs = half(torch.tensor([PROMPT])).logits[0].float()
    _, ours = load_runner(tmp_path, overrides=ModelOverrides(dtype="bfloat16")).prefill(PROMPT)
    assert ours.dtype == torch.float32
    limit = BFLOAT16_ERROR_RATIO * (theirs - exact).abs().mean()
    assert (ours - exact).abs().mean() <= limit
