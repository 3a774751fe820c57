"""Guards that dividing a model over ranks never shows: TP 2, TP 4, PP 2 and TP 2 × PP 2 equal one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_graphs import use_recordings
from tests.helpers.rank_group import Outcome, rank_config, run_group
from tests.helpers.tiny_models import TINY_MODELS, TinyModel, write_tiny_model
from tests.tolerances import LOGITS_FLOAT32_RANKS

# Eight query heads over two KV heads: with four ranks each KV head is held twice. 211 tokens divide by
# neither two nor four.
MODELS = {
    "qwen3_bias_tied": TinyModel(
        "qwen3_moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "num_attention_heads": 8,
            "attention_bias": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    "dense": TinyModel(
        "qwen3_moe",
        {"num_experts": 2, "num_experts_per_tok": 1, "num_attention_heads": 4, "mlp_only_layers": [0, 1, 2]},
    ),
    "glm4_shared": TinyModel(
        "glm4_moe",
        {
            "n_routed_experts": 6,
            "num_mtp_layers": 0,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "norm_topk_prob": True,
        },
    ),
    "glm_sparse_dense": TinyModel(
        "glm_moe_dsa",
        TINY_MODELS["glm_moe_dsa_shared_groups_biased_tied"].changes | {"first_k_dense_replace": 4},
    ),
    "gpt_oss": TinyModel(
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "num_attention_heads": 8, "sliding_window": 5},
    ),
    "minimax": TinyModel(
        "minimax_m2",
        {"num_experts_per_tok": 3, "num_local_experts": 6, "num_attention_heads": 8, "rotary_dim": 8},
    ),
    # Eight heads in one layer, four in those that slide; clamps of both kinds of experts.
    "step_differing_heads": TinyModel(
        "step3p5",
        {
            "num_attention_heads": 8,
            "moe_num_experts": 6,
            "moe_top_k": 2,
            "share_expert_dim": 20,
            "moe_layers_enum": "1,2",
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 5,
            "attention_other_setting": {"num_attention_heads": 4},
            "rope_theta": [5e5, 1e4, 1e4],
            "partial_rotary_factors": [0.5, 1.0, 1.0],
            "swiglu_limits": [0.0, 0.5, 0.0],
            "swiglu_limits_shared": [0.4, 0.0, 0.6],
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen2_shared_gate": TinyModel(
        "qwen2_moe", {"num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 30}
    ),
}
MODELS |= {
    name: TinyModel("qwen3_next" if "mixed" in name else "qwen3_5_moe_text", changes)
    for name, changes in {
        "linear_mixed_projections": {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 28,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 10,
            "rms_norm_eps": 1e-3,
        },
        "linear_apart": TINY_MODELS["qwen3_5_moe_text_bias_tied"].changes,
    }.items()
}
Truth = Callable[[str], tuple[Path, dict[str, list[Outcome]]]]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A model's directory, and what one rank says."""

    @cache
    def make(name: str) -> tuple[Path, dict[str, list[Outcome]]]:
        directory = tmp_path_factory.mktemp(name)
        write_tiny_model(MODELS[name], directory, seed=11)
        return directory, run_group(rank_config(directory, 1, 1))

    return make


@pytest.mark.parametrize(
    ("name", "tp", "pp", "changes"),
    [
        ("qwen3_bias_tied", 2, 1, {}),
        ("qwen3_bias_tied", 4, 1, {"gpu_experts_ratio": 0.5}),
        ("qwen3_bias_tied", 1, 2, {}),
        ("qwen3_bias_tied", 2, 2, {"overlap_scheduling": False}),
        ("glm4_shared", 2, 2, {"gpu_experts_ratio": 0.5}),
        ("gpt_oss", 4, 1, {}),
        ("gpt_oss", 2, 2, {}),
        ("step_differing_heads", 2, 2, {}),
        ("linear_mixed_projections", 2, 1, {}),
        ("linear_apart", 2, 2, {}),
        ("minimax", 4, 1, {}),
        ("qwen2_shared_gate", 2, 1, {}),
    ],
    ids=lambda value: str(value),
)
def test_ranks_do_not_show(truth: Truth, name: str, tp: int, pp: int, changes: dict[str, Any]) -> None:
    """Chunked batches, prefix hits, sampling with penalties, scores, aborts and flushes: as on one rank.

    Also where half of the experts are each rank's own device's.
    """
    directory, expected = truth(name)
    assert_same(run_group(rank_config(directory, tp, pp, **changes)), expected)


@pytest.mark.parametrize(("name", "tp", "pp"), [("dense", 2, 1), ("dense", 1, 2), ("glm_sparse_dense", 1, 2)])
def test_replayed_decode_steps_do_not_show(truth: Truth, name: str, tp: int, pp: int) -> None:
    """Decode steps recorded with their collectives, as a GPU replays them, of padded batches and stages.

    Also of latent attention, of stages that choose tokens for themselves in their first layers.
    """
    directory, expected = truth(name)
    assert_same(run_group(rank_config(directory, tp, pp), use_recordings), expected)


def assert_same(found: dict[str, list[Outcome]], expected: dict[str, list[Outcome]]) -> None:
    """Tokens, ends and cached prefixes are equal, scores nearly so."""
    assert [case for case in expected if case not in found] in ([], ["recorded"])
    for case, outcomes in ((case, expected[case]) for case in found):
        for index, (ours, theirs) in enumerate(zip(found[case], outcomes, strict=True)):
            where = f"{case}[{index}]"
            assert ours.token_ids == theirs.token_ids, where
            assert (ours.finish_reason, ours.cached_len) == (theirs.finish_reason, theirs.cached_len), where
            for kind in ("logprobs", "prompt_logprobs"):
                expected_scores = pytest.approx(getattr(theirs, kind), abs=LOGITS_FLOAT32_RANKS)
                assert getattr(ours, kind) == expected_scores, f"{where}.{kind}"
    assert any(outcome.cached_len for outcome in expected["prefix"])
    assert expected["aborted"][0].finish_reason == "abort"
