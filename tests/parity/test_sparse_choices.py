"""Invariant: the tiny models with sparse attention leave tokens out, clearly, and all ways to run them agree.

That their results are right is shown with those of all other families in `test_tiny_models.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.compressed import torch_reference as compressed_reference
from gpu_service.attention.mla import torch_reference
from gpu_service.attention.mla.triton_backend import TritonMlaAttention
from gpu_service.attention.registry import mla_dimensions
from gpu_service.cache.kv_cache import MlaCache
from gpu_service.loader.load import load_weights
from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.models.read import read_model_config
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import KINDS, make_tiny_model
from tests.tolerances import INDEX_SCORE_GAP, LOGITS_FLOAT32_SELF

PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15]
SHARED = "glm_moe_dsa_shared_groups_biased_tied"


def rewrite(directory: Path, **changes: object) -> None:
    """Changes keys of the language model in a checkpoint's config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(changes)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", KINDS["sparse"])
def test_choices_matter_and_are_clear(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows after few tokens are those of dense attention, later ones are not; no score is a near tie."""
    gaps: list[float] = []
    select = torch_reference.select_tokens

    def watch(scores: torch.Tensor, lengths: torch.Tensor, top_k: int) -> torch.Tensor:
        positions = torch.arange(scores.shape[1])
        visible = scores.masked_fill(positions >= lengths[:, None], float("-inf"))
        best = visible.topk(top_k + 1, dim=-1).values[lengths > top_k]
        gaps.extend((best[:, -2] - best[:, -1]).tolist())
        return select(scores, lengths, top_k)

    monkeypatch.setattr(torch_reference, "select_tokens", watch)
    monkeypatch.setattr(compressed_reference, "select_tokens", watch)
    make_tiny_model(name, tmp_path)
    _, sparse = load_runner(tmp_path).prefill(PROMPT)
    changes = KINDS["sparse"][name].changes
    # Rows up to which no more are to choose from: tokens, or entries of several.
    rate = changes.get("compress_rates", {}).get("compressed_sparse_attention", 1)
    top_k = (changes["index_topk"] + 1) * rate - 1
    blocks = {key: len(PROMPT) for key in changes if key == "candidate_topk_blocks"}
    rewrite(tmp_path, index_topk=len(PROMPT), **blocks)
    _, dense = load_runner(tmp_path).prefill(PROMPT)
    torch.testing.assert_close(sparse[:top_k], dense[:top_k], rtol=0, atol=LOGITS_FLOAT32_SELF)
    assert (sparse[top_k:] - dense[top_k:]).abs().max() > 0.1
    assert min(gaps) > INDEX_SCORE_GAP, "choose other sizes: two tokens are too close to tell apart"


@pytest.mark.parametrize(
    "name", ["deepseek_v32_listed_layers_biased_tied", SHARED, "hy_v4", "mistral_large4"]
)
def test_a_model_does_not_see_that_triton_chooses_and_attends(name: str, tmp_path: Path) -> None:
    """A first chunk that attends to everything and two tokens after it that do not."""
    make_tiny_model(name, tmp_path)
    expected, ours = load_runner(tmp_path), load_runner(tmp_path)
    assert isinstance(ours.kv_cache, MlaCache)
    ours.attention = TritonMlaAttention(mla_dimensions(ours.model.config.layers), ours.kv_cache, min_split=16)
    wanted, logits = (runner.prefill(PROMPT[:8], chunk=5)[1] for runner in (expected, ours))
    assert ours.attention.selects
    torch.testing.assert_close(logits, wanted, rtol=0, atol=LOGITS_FLOAT32_SELF)


def test_index_keys_are_of_the_layers_that_choose(tmp_path: Path) -> None:
    """Every token's, written in its slot even while everything is attended to."""
    make_tiny_model(SHARED, tmp_path)
    runner = load_runner(tmp_path)
    sequence, _ = runner.prefill(PROMPT[:5])
    keys = runner.kv_cache.index_keys  # type: ignore[union-attr]
    assert keys is not None
    assert keys.num_layers == 2
    for layer in range(2):
        written = keys.pages(layer).abs().sum(-1) > 0
        assert written[sequence.pages].flatten().tolist() == [True] * 5 + [False] * 3
        assert int(written.sum()) == 5


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["full"] * 4, r"missing: model.layers.1.self_attn.indexer.k_norm.bias"),
        (["full", "shared", "shared", "shared"], r"unused: model.layers.2.self_attn.indexer.k_norm.bias"),
    ],
)
def test_a_checkpoint_must_have_the_indexers_it_says(kinds: list[str], message: str, tmp_path: Path) -> None:
    """No more and no fewer, by name."""
    make_tiny_model(SHARED, tmp_path)
    rewrite(tmp_path, indexer_types=kinds)
    with pytest.raises(CheckpointError, match=message):
        load_weights(build_model(read_model_config(tmp_path)), tmp_path)
