"""Invariant: whichever of head and embedding a checkpoint stores, we use what transformers uses.

`tie_word_embeddings` says that both are one matrix; files of fine-tunes say otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.models.read import read_model_config
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import make_tiny_model
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

PROMPT = [3, 17, 200, 5, 99, 42, 8, 150]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Returns the checkpoint of a model with a head of its own."""
    make_tiny_model("qwen3_moe", tmp_path)
    return tmp_path


def change(directory: Path, tied: bool, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    return directory


def last_row(tensors: Tensors) -> None:
    """A copy that was trained in its last row only."""
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1] += 1


CASES: dict[str, tuple[Callable[[Tensors], Any], bool]] = {
    # Edit, and whether head and embedding are one.
    "another": (lambda tensors: None, False),
    "another_in_one_row": (last_row, False),
    "a_copy": (lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}), True),
    "a_copy_of_another_type": (
        lambda tensors: tensors.update(
            {HEAD: tensors[EMBEDDING].bfloat16(), EMBEDDING: tensors[EMBEDDING].bfloat16().float()}
        ),
        True,
    ),
    "embedding_alone": (lambda tensors: tensors.pop(HEAD), True),
    "head_alone": (lambda tensors: tensors.pop(EMBEDDING), True),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_stored_head_is_used_as_transformers_uses_it(case: str, checkpoint: Path) -> None:
    """With tie_word_embeddings another head counts, a copy does not, and one alone is both."""
    import transformers

    edit, is_one = CASES[case]
    directory = change(checkpoint, True, edit)
    assert read_model_config(directory).tie_word_embeddings is is_one
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    _, logits = load_runner(directory).prefill(PROMPT)
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


def test_a_missing_head_is_an_error_where_it_is_no_embedding(checkpoint: Path) -> None:
    """Transformers would draw a random one, and warn."""
    directory = change(checkpoint, False, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(CheckpointError, match=rf"1 missing: {HEAD}"):
        load_runner(directory)


def test_neither_is_an_error(checkpoint: Path) -> None:
    directory = change(checkpoint, True, lambda tensors: (tensors.pop(HEAD), tensors.pop(EMBEDDING)))
    with pytest.raises(CheckpointError, match=rf"1 missing: {EMBEDDING}"):
        load_runner(directory)


@pytest.mark.parametrize("stored", [lambda t: t[HEAD][:-1], lambda t: t[HEAD].to(torch.int32)])
def test_a_head_that_can_not_be_one_is_refused_by_name(
    checkpoint: Path, stored: Callable[[Tensors], torch.Tensor]
) -> None:
    """Neither dropped for the embedding nor read as something else."""
    directory = change(checkpoint, True, lambda tensors: tensors.update({HEAD: stored(tensors).contiguous()}))
    with pytest.raises(CheckpointError, match=HEAD):
        load_runner(directory)


def test_the_forecast_of_memory_counts_the_head_that_is_used(checkpoint: Path) -> None:
    directory = change(checkpoint, True, lambda tensors: None)
    assert build_model(read_model_config(directory)).lm_head is not None
