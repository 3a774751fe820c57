"""Invariant: config.json of families with sparse attention is understood as published, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_service.cache.kv_cache import make_cache, page_bytes
from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import check_divisible, rank_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.memory.plan import StepSize, activation_bytes
from moebius.errors import ConfigError
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.layers.latent import MLA, TokenIndexer
from moebius.models.layers.layer import indexed
from moebius.models.read import read_geometry
from tests.helpers.layer_values import first, mixers_of, read_config
from tests.unit.moebius.models.test_mla import V3

# The keys of the published DeepSeek-V3.2 and GLM-5.2 that change the function, with small sizes.
V32: dict[str, Any] = V3 | {
    "model_type": "deepseek_v32",
    "index_n_heads": 6,
    "index_head_dim": 8,
    "index_topk": 16,
}
GLM: dict[str, Any] = V32 | {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 8,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": "absent",
    "rope_theta": "absent",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5,
    "layer_types": ["indexed_attention"] * 8,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "index_share_for_mtp_iteration": True,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "indexer_types": ["full"] * 3 + ["shared"] * 3 + ["full", "shared"],
}


def indexer(config: ModelConfig) -> TokenIndexer:
    """How a model that chooses tokens does so, in all layers alike."""
    (found,) = {mixer.indexer for mixer in mixers_of(config, MLA) if mixer.indexer is not None}
    return found


def choosing(config: ModelConfig) -> list[int]:
    """The layers that choose for themselves; all others take over what an earlier one chose."""
    found = mixers_of(config, MLA)
    assert all(mixer.is_sparse for mixer in found)
    return [layer for layer, mixer in enumerate(found) if mixer.indexer is not None]


def test_deepseek_has_an_indexer_in_every_layer(tmp_path: Path) -> None:
    """All else is DeepSeek-V3's."""
    config = read_config(tmp_path, V32)
    assert config.unread_keys == ()
    assert indexer(config) == TokenIndexer(num_heads=6, head_dim=8, top_k=16, interleaved=False)
    assert choosing(config) == [0, 1, 2, 3]
    v3 = read_config(tmp_path, V3)
    assert config.routed == v3.routed
    assert replace(first(config, MLA), is_sparse=False, indexer=None) == first(v3, MLA)
    assert config.num_mtp_layers == 1
    older = read_config(tmp_path, V32, layer_types=["deepseek_sparse_attention"] * 4)
    assert older.layers == config.layers, "what transformers 5.17 writes for indexed_attention"
    assert read_geometry(tmp_path).moe_layers == (3,)


def test_glm_lists_which_layers_choose(tmp_path: Path) -> None:
    """The list counts first, then the pattern, then the schedule; here all three say the same."""
    config = read_config(tmp_path, GLM)
    assert config.unread_keys == ()
    wanted = [0, 1, 2, 6]
    assert indexer(config) == TokenIndexer(num_heads=6, head_dim=8, top_k=16, interleaved=True)
    assert choosing(config) == wanted
    assert read_geometry(tmp_path).moe_layers == (3, 4, 5, 6, 7)
    assert choosing(read_config(tmp_path, GLM, indexer_types=None, index_topk_pattern="FFFSSSFS")) == wanted
    assert choosing(read_config(tmp_path, GLM, indexer_types=None)) == wanted
    # GLM-5 knows no sharing.
    plain = read_config(
        tmp_path, GLM, indexer_types="absent", index_topk_freq="absent", index_skip_topk_offset="absent"
    )
    assert choosing(plain) == list(range(8))
    # The default offset leaves the first two layers full.
    second = read_config(
        tmp_path, GLM, indexer_types=None, index_topk_freq=3, index_skip_topk_offset="absent"
    )
    assert choosing(second) == [0, 1, 4, 7]


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (V32, {"q_lora_rank": None}, "q_lora_rank = None.*indexer"),
        (V32, {"index_topk": "absent"}, "index_topk is missing"),
        (V32, {"index_topk": 0}, "index_topk = 0"),
        (V32, {"index_n_heads": 0}, "index_n_heads = 0"),
        (V32, {"index_head_dim": 2}, r"index_head_dim = 2.*qk_rope_head_dim \(4\)"),
        (V32, {"rope_interleave": False}, "rope_interleave = False.*true"),
        (V32, {"indexer_rope_interleave": True}, "indexer_rope_interleave = True.*false"),
        (V32, {"indexer_types": ["full"] * 4}, "indexer_types = .*absent"),
        (V32, {"index_topk_freq": 2}, "index_topk_freq = 2.*absent"),
        (V32, {"mlp_bias": True}, "mlp_bias = True"),
        (V32, {"layer_types": ["full_attention"] * 4}, "layer_types = .*indexed_.*deepseek_sparse_attention"),
        (GLM, {"indexer_rope_interleave": False}, "indexer_rope_interleave = False.*true"),
        (GLM, {"indexer_types": ["full"] * 7}, "indexer_types = .*8 of 'full'"),
        (GLM, {"indexer_types": ["full"] * 7 + ["none"]}, "indexer_types = .*8 of 'full'"),
        (GLM, {"indexer_types": ["shared"] + ["full"] * 7}, "indexer_types = .*the first one full"),
        (GLM, {"indexer_types": None, "index_topk_pattern": "FFXSFFFF"}, "index_topk_pattern = .*'X'"),
        (GLM, {"indexer_types": None, "index_skip_topk_offset": 0}, "index_skip_topk_offset = 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read_config(tmp_path, base, **changes)


def test_pages_hold_the_keys_of_layers_that_choose(tmp_path: Path) -> None:
    """Every rank has them, whatever its part of the heads; a stage has its own layers'."""
    config = read_config(tmp_path, GLM)
    heads = rank_layers(config, ParallelContext(1, 2))
    stage = rank_layers(
        read_config(tmp_path, GLM, indexer_types=["full", "shared"] * 4), ParallelContext(0, 1, 1, 2)
    )
    latent, key = 24, 8
    dtype = TORCH_DTYPES[config.dtype]
    for part, layers, choosing in ((config.layers, 8, 4), (heads, 8, 4), (stage, 4, 2)):
        wanted = 16 * 2 * (layers * latent + choosing * key)
        assert page_bytes(part, 16, dtype, dtype) == wanted
        cache = make_cache(part, 3, 16, dtype)
        assert cache.nbytes == 3 * wanted


def test_a_stage_begins_with_a_layer_that_chooses(tmp_path: Path) -> None:
    """What an earlier stage chose is not sent along."""
    config = read_config(tmp_path, GLM)
    with pytest.raises(ConfigError, match=r"2 stages would begin at layer 4.*\[0, 1, 2, 6\]"):
        check_divisible(config, ParallelContext(num_stages=2))
    config = read_config(tmp_path, GLM, indexer_types=["full", "shared"] * 4)
    last = rank_layers(config, ParallelContext(stage=1, num_stages=2))
    assert [i for i, layer in enumerate(last) if indexed([layer])] == [0, 2]


def test_the_plan_counts_what_a_choice_takes(tmp_path: Path) -> None:
    """Per token, and no less for being one of several ranks."""
    sparse, dense = read_config(tmp_path, V32), read_config(tmp_path, V3)
    step = StepSize(1000, 1)
    for parallel in (SOLO, ParallelContext(0, 4)):
        planned, less = (activation_bytes(config, step, parallel, False) for config in (sparse, dense))
        assert planned - less >= 1000 * 4 * indexer(sparse).top_k
