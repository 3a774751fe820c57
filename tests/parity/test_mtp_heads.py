"""Invariant: layers of multi-token prediction compute what transformers' `MtpModel` computes, row by row.

Their positions, their caches and their experts are the reference's, however a sequence is cut into steps; a
checkpoint that has them is served without them bit by bit as one that has none.
"""

from __future__ import annotations

import pytest
import torch

from moebius.models.config import ModelOverrides
from tests.helpers.mtp_models import MtpModels, cached_mtp_models, head_logits
from tests.helpers.paged_runner import load_runner
from tests.tolerances import LOGITS_FLOAT32_SELF, LOGITS_FLOAT32_VS_TRANSFORMERS

TOKENS = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15]
MODELS = (
    "glm4_moe",
    "glm4_moe_groups_tied",
    "deepseek_v3",
    "deepseek_v3_direct_query_half_split_tied",
    "kimi_k2",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm_moe_dsa_shared_groups_biased_tied",
)


def _family(name: str) -> str:
    return name.split("_groups")[0].split("_direct")[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> MtpModels:
    return cached_mtp_models(tmp_path_factory.mktemp("mtp"))


@pytest.mark.covering(1, name=_family)
@pytest.mark.parametrize("name", MODELS)
def test_a_heads_logits_match_transformers(name: str, written: MtpModels) -> None:
    directory, reference = written(name, 1)
    runner = load_runner(directory, overrides=ModelOverrides(mtp_heads=1))
    (found,) = head_logits(runner, TOKENS)
    (expected,) = reference.logits(TOKENS)
    assert expected.std() > 0.5, "flat logits would hide errors"
    torch.testing.assert_close(found[:-1], expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


def test_two_heads_follow_one_another(written: MtpModels) -> None:
    """The second reads what the first made, and has a cache and experts of its own."""
    directory, reference = written("glm4_moe", 2)
    runner = load_runner(directory, overrides=ModelOverrides(mtp_heads=5))
    found = head_logits(runner, TOKENS, heads=[0, 1])
    for head, expected in enumerate(reference.logits(TOKENS, 2)):
        torch.testing.assert_close(
            found[head][: -1 - head], expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS
        )


def test_only_as_many_heads_as_are_asked_for_are_loaded(
    written: MtpModels,
) -> None:
    runner = load_runner(written("glm4_moe", 2)[0], overrides=ModelOverrides(mtp_heads=1))
    assert (runner.model.config.num_mtp_heads, len(runner.model.model.layers)) == (1, 4)
    assert runner.kv_cache.num_layers == 4


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_steps_of_any_size_give_the_heads_logits(name: str, written: MtpModels) -> None:
    """What a head keeps of earlier steps lies in its cache."""
    runner = load_runner(written(name, 1)[0], overrides=ModelOverrides(mtp_heads=1))
    (whole,) = head_logits(runner, TOKENS)
    (cut,) = head_logits(runner, TOKENS, [8, 1, 1, 5, 6])
    torch.testing.assert_close(cut, whole, rtol=0, atol=LOGITS_FLOAT32_SELF)


def test_a_model_served_without_its_heads_is_the_same_and_loads_none(
    written: MtpModels,
) -> None:
    directory, reference = written("glm4_moe", 1)
    plain, with_head = (load_runner(directory, overrides=ModelOverrides(mtp_heads=heads)) for heads in (0, 1))
    assert len(plain.model.model.layers) == plain.kv_cache.num_layers == 3
    _, logits = plain.prefill(TOKENS)
    assert torch.equal(logits, with_head.prefill(TOKENS)[1])
    expected = reference.model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
