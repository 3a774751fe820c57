"""Invariant: hyper-connections and choices of pools are transformers', however they are computed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.mla.base import IndexDimensions
from gpu_service.attention.mla.torch_reference import expand_pools, index_scores, select_tokens
from gpu_service.attention.mla.triton_kernels import choose_tokens
from gpu_service.models.compose import build_model
from gpu_service.ops.hyper_connections import collapse_streams, mix_streams
from gpu_service.ops.kv import pool_index_keys
from gpu_service.ops.triton import hyper_connections as kernels
from moebius.models.config import ModelConfigError
from moebius.models.layers.ffn import MoE
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import cached
from moebius.models.layers.recurrent import KDA
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.layer_values import first, first_moe, mixers_of
from tests.helpers.published_checkpoints import Published
from tests.tolerances import OP_FLOAT32

TOKENS, SIZE = 5, 24


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("num_streams", "iterations"), [(4, 20), (3, 2)])
def test_weights_and_streams_are_transformers(num_streams: int, iterations: int) -> None:
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

    config = Glm5NextTextConfig(
        hidden_size=SIZE, hc_mult=num_streams, hc_sinkhorn_iters=iterations, hc_eps=1e-3, rms_norm_eps=1e-3
    )
    reference = Glm5NextTextHyperConnection(config)
    streams, output = _random(TOKENS, num_streams, SIZE), _random(TOKENS, SIZE)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(0.3 * _random(*parameter.shape))
        post, comb, collapsed = (part[0] for part in reference(streams[None]))
        got = collapse_streams(streams, reference.fn, reference.base, reference.scale, 1e-3, 1e-3, iterations)
        mixed = post[..., None] * output[:, None] + comb.mT @ streams
        ours = mix_streams(output, streams.clone(), got.post, got.comb)
    for one, other in zip((*got[:3], ours), (collapsed, post, comb, mixed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=OP_FLOAT32)


@pytest.mark.parametrize("num_streams", [4, 3])
def test_independent_streams_are_transformers(num_streams: int) -> None:
    """Hy4's: no stream takes of another, and what is added has a weight of its own."""
    from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
    from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

    config = HYV4Config(
        hidden_size=SIZE, hc_mult=num_streams, hc_magnitude=1.5, hc_eps=1e-3, rms_norm_eps=1e-3
    )
    reference = HYV4HyperConnection(config)
    ways = [(collapse_streams, mix_streams)]
    if not torch.cuda.is_available():  # Kernels are compiled where a GPU is.
        ways.append((kernels.collapse_streams, kernels.mix_streams))
    streams, output = _random(TOKENS, num_streams, SIZE), _random(TOKENS, SIZE)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(0.3 * _random(*parameter.shape))
        post, collapsed = (part[0] for part in reference(streams[None]))
        weights = reference.fn, reference.base, reference.scale
        for collapse, mix in ways:
            got = collapse(streams, *weights, 1e-3, 1e-3, 0, 1.5)
            ours = mix(output, streams.clone(), got.post, got.comb)
            assert got.comb.numel() == 0
            mixed = post[..., None] * output[:, None] + streams
            for one, other in zip((got.hidden_states, got.post, ours), (collapsed, post, mixed), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=OP_FLOAT32)


def test_keys_of_pools_do_not_depend_on_how_a_sequence_is_cut() -> None:
    """Pages of 4, pools of 6: the last token of a pool gets the key of all of them, again and again."""
    pool, size, length, page_size = 6, 10, 20, 4
    rows, offsets, table = _random(length, 2 * size), _random(pool, size), torch.arange(1, 6)[None].int()
    positions = torch.arange(length)
    slots = table[0, positions // page_size].long() * page_size + positions % page_size

    def stored(cuts: list[int]) -> torch.Tensor:
        cache = torch.zeros(6 * page_size, 2 * size)
        for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
            for _ in range(2):
                cache[slots[begin:end]] = rows[begin:end]
                starts = torch.tensor([0, end - begin], dtype=torch.int32)
                where = positions[begin:end], slots[begin:end], table, starts, page_size
                pool_index_keys(cache, offsets, *where)
        return cache[slots]

    whole = stored([])
    for cuts in ([1, 2, 7], [6, 12], [5, 13, 19]):
        assert torch.equal(stored(cuts), whole)
    weights = (rows[6:12, size:] + offsets).softmax(0)
    expected = (weights * rows[6:12, :size]).sum(0)
    torch.testing.assert_close(whole[11, :size], expected, rtol=1e-5, atol=OP_FLOAT32)
    unpooled = [token for token in range(length) if (token + 1) % pool]
    assert torch.equal(whole[unpooled], rows[unpooled])


def test_tokens_of_chosen_pools_and_those_after_the_last() -> None:
    """Fewer pools than may be chosen, exactly as many, and more; then -1."""
    lengths, index = torch.tensor([2, 7, 12, 14]), IndexDimensions(1, 4, top_k=6, pool=3)
    scores = torch.tensor([[0.0] * 4, [1.0, 2.0, 0, 0], [4.0, 1.0, 1.0, 3.0], [1.0, 3.0, 0.0, 2.0]])
    chosen = select_tokens(scores, lengths // index.pool, index.top_k // index.pool)
    expected = [
        [0, 1, -1, -1, -1, -1, -1, -1],
        [0, 1, 2, 3, 4, 5, 6, -1],
        [0, 1, 2, 9, 10, 11, -1, -1],
        [3, 4, 5, 9, 10, 11, 12, 13],
    ]
    assert expand_pools(chosen, lengths, index.pool).tolist() == expected
    assert index.selected == len(expected[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")
def test_the_kernels_choose_the_references_pools() -> None:
    """Two requests, a chunk after earlier tokens and one token; keys lie with the last token of a pool."""
    index, page_size = IndexDimensions(3, 10, top_k=8, pool=4), 8
    lengths, new = [30, 45], [13, 1]
    table = torch.tensor([[1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 9, 10]], dtype=torch.int32)
    keys, starts = _random(11, page_size, 2 * index.head_dim), torch.tensor([0, 13, 14], dtype=torch.int32)
    query, weights = _random(14, index.num_heads, index.head_dim), _random(14, index.num_heads)
    seq_lens, scratch = torch.tensor(lengths, dtype=torch.int32), torch.empty(4096)
    got = choose_tokens(query, weights, keys, table, seq_lens, starts, 48, index, scratch)
    for request, (length, rows) in enumerate(zip(lengths, new, strict=True)):
        own = slice(int(starts[request]), int(starts[request]) + rows)
        pools = keys[table[request].long()].flatten(0, 1)[3:length:4, : index.head_dim]
        ends = torch.arange(length - rows + 1, length + 1)
        scores = index_scores(query[own], weights[own], pools)
        expected = expand_pools(select_tokens(scores, ends // 4, 2), ends, 4)
        assert torch.equal(got[own], expected)


def _read_hy(tmp_path: Path, **changes: Any) -> Any:
    """Hy4 as published; None leaves a key out."""
    config = Published.load("hy4-preview").config | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return read_model_config(tmp_path)


def test_hy4_is_read(tmp_path: Path) -> None:
    """Neighbours in published weights are a rotary pair; keys that transformers has not tell them."""
    config = _read_hy(tmp_path)
    hyper, mixers = config.layers[0].residual, mixers_of(config, MLA)
    indexer, rope = mixers[0].indexer, mixers[0].rope
    choosing = [layer for layer, mixer in enumerate(mixers) if mixer.indexer is not None]
    assert (hyper.num_streams, hyper.iterations, hyper.magnitude, hyper.weighs_last) == (4, 0, 2.0, True)
    assert choosing == [0, *range(1, 78, 4)]
    assert (rope.interleaved, indexer.interleaved, indexer.rotates_last) == (True, True, True)
    assert config.moe_layer_ids == tuple(range(1, 78))
    assert first_moe(config).shared.limit == math.inf
    geometry = read_geometry(tmp_path)
    assert (geometry.activation, geometry.limit_of(3)) == ("clamped_silu", 10.0)
    own = dict.fromkeys(("enable_ihc", "gated_mla", "gating_type", "learnable_sink"))
    as_transformers = _read_hy(tmp_path, **own, indexer_types=None, layer_types=None, mlp_layer_types=None)
    others = mixers_of(as_transformers, MLA)
    assert others[0].rope.interleaved is others[0].indexer.interleaved is False
    assert [layer for layer, mixer in enumerate(others) if mixer.indexer is not None] == choosing
    assert as_transformers.moe_layer_ids == config.moe_layer_ids
    assert first(_read_hy(tmp_path, rope_interleave=False), MLA).rope.interleaved is False
    assert first_moe(_read_hy(tmp_path, swiglu_limit=0.0)).experts.activation == "silu"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"enable_ihc": False}, "enable_ihc = False"),
        ({"learnable_sink": False}, "learnable_sink = False"),
        ({"gating_type": "headwise"}, "gating_type = 'headwise'"),
        ({"q_lora_rank": None}, "the indexer reads the queries' latent"),
        ({"index_head_dim": 32}, "at least qk_rope_head_dim"),
        ({"layer_types": ["full_attention"] * 78}, "deepseek_sparse_attention"),
        ({"indexer_types": ["shared"] * 78}, "the first full"),
        ({"swiglu_limit": True}, "a number"),
    ],
)
def test_what_hy4_has_not_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        _read_hy(tmp_path, **changes)


def _read(tmp_path: Path, **changes: Any) -> Any:
    config = Published.load("glm-5.3-flash").config
    text = config["text_config"] | changes
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
    return read_model_config(tmp_path)


def test_glm_5_3_flash_is_read(tmp_path: Path) -> None:
    config = _read(tmp_path)
    assert ([i for i, layer in enumerate(config.layers) if cached([layer])], first(config, MLA).rope) == (
        list(range(3, 45, 4)),
        None,
    )
    assert first(config, KDA).decay_bound == -5.0
    hyper = config.layers[0].residual
    assert (hyper.num_streams, hyper.iterations, config.stream_size) == (4, 20, 4 * 4096)
    assert [part.row for part in config.layers[3].mixer.cache] == [(512,), (256,)]
    assert config.moe_layer_ids == tuple(range(3, 45))
    dense = [ffn.shared if isinstance(ffn, MoE) else ffn for layer in config.layers for ffn in layer.ffns]
    assert [ffn.limit for ffn in dense] == [10.0] * 45
    geometry = read_geometry(tmp_path)
    assert (geometry.activation, geometry.limit_of(3)) == ("clamped_silu", 10.0)
    assert build_model(config).config is config


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"qk_rope_head_dim": 64}, "allowed: 0"),
        ({"index_topk": 2042}, "a multiple of index_kpool"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ({"layer_types": ["linear_attention"] * 45}, "some of both"),
        ({"indexer_types": ["full"] * 3 + ["shared"] * 42}, "in each layer that attends"),
        ({"linear_attn_config": {"gate_lower_bound": 2.0}}, "a number below 0"),
        ({"linear_attn_config": {"safe_gate": False}}, "safe_gate"),
    ],
)
def test_what_glm_5_3_flash_has_not_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        _read(tmp_path, **changes)
