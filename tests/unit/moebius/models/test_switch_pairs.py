"""Invariant: any two switches of a `ModelConfig` that touch norms, attention or layers are both computed, as
`tests.helpers.written_model` has them written down, or one is refused by name when the model is composed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from gpu_service.loader.names import expected_names
from gpu_service.models.compose import build_model
from moebius.models.attention_config import (
    BlockIndexerConfig,
    CompressedAttentionConfig,
    HyperConnectionConfig,
    MlaConfig,
    NormedResidualConfig,
)
from moebius.models.config import (
    LinearAttentionConfig,
    ModelConfig,
    ModelConfigError,
    MoeConfig,
    RopeConfig,
    RouterConfig,
)
from moebius.models.switches import check_switches
from tests.helpers.paged_runner import PagedRunner
from tests.helpers.written_model import ListedExperts, WrittenModel

ROPE = RopeConfig(theta=100.0, rotary_dim=4)
_ROUTER = RouterConfig(num_experts=3, top_k=2, score="softmax")
# Layers 1 and 2 have experts, 0 and 3 a dense MLP. With a large epsilon a factor before a norm shows.
BASE = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=29,
    hidden_size=20,
    intermediate_size=12,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=0.05,
    activation="silu",
    rope=ROPE,
    moe=MoeConfig(_ROUTER, 8, 10, frozenset({1, 2})),
    dtype="float32",
    max_model_len=64,
)
PROMPT = torch.tensor([3, 17, 20, 5, 9, 12, 12, 8, 15, 23, 1])
_MLA = MlaConfig(
    q_lora_rank=11, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, softmax_scale=0.4
)
_CONV = LinearAttentionConfig(
    num_key_heads=20,
    num_value_heads=20,
    key_head_dim=0,
    value_head_dim=1,
    conv_width=3,
    layers=frozenset({3}),
    short_conv=True,
)
_COMPRESSED = CompressedAttentionConfig(
    q_lora_rank=11,
    rope_dim=4,
    window=4,
    rates=(0, 4, 0, 4),
    sparse_layers=frozenset(),
    index_num_heads=2,
    index_head_dim=8,
    top_k=2,
    output_groups=2,
    output_rank=6,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So small a model only waits for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Change = Callable[[ModelConfig], ModelConfig]


def _set(**values: Any) -> Change:
    return lambda config: replace(config, **values)


def _rope(**values: Any) -> Change:
    """Returns the rotations of all layers that rotate."""

    def change(config: ModelConfig) -> ModelConfig:
        turn = partial(replace, **values)
        ropes = tuple(None if rope is None else turn(rope) for rope in config.layer_ropes)
        assert config.rope is not None
        return replace(config, rope=turn(config.rope), layer_ropes=ropes)

    return change


def _moe(**values: Any) -> Change:
    return lambda config: replace(config, moe=replace(config.moe, **values))


def _unrotated(config: ModelConfig) -> ModelConfig:
    return replace(config, layer_ropes=(config.rope, None, config.rope, config.rope))


SWITCHES: dict[str, Change] = {
    "qk_norm": _set(qk_norm=True),
    "qk_norm_full_width": _set(qk_norm=True, qk_norm_full_width=True),
    "qk_norm_after_rope": _set(qk_norm=True, qk_norm_after_rope=True),
    "unit_qk_norm": _set(unit_qk_norm=True),
    "unrotated_query_growth": lambda config: replace(
        _unrotated(config), unrotated_query_growth=0.5, unrotated_query_growth_length=3.0
    ),
    "one_plus_weight_norms": _set(one_plus_weight_norms=True),
    "attention_bias": _set(attention_bias=True),
    "output_bias": _set(output_bias=True),
    "mean_norms": _set(mean_norms=True),
    "norm_bias": _set(mean_norms=True, norm_bias=True),
    "output_gate": _set(output_gate=True),
    "element_gate": _set(element_gate=True),
    "head_gate": _set(head_gate=True),
    "gate_activation": _set(head_gate=True, gate_activation="softplus"),
    "output_norms": _set(output_norms=True),
    "moe_output_norms": _set(moe_output_norms=True),
    "input_norms": _set(input_norms=False),
    "embedding_scale": _set(embedding_scale=3.0),
    "residual_scale": _set(residual_scale=0.4),
    "logit_scale": _set(logit_scale=0.3),
    "layer_halves": lambda config: _moe(layers=frozenset({2}))(
        replace(config, layer_halves=("attention", "attention", "mlp", "attention"))
    ),
    "shortcut_experts": lambda config: _moe(layers=frozenset(range(4)))(
        SWITCHES["mla"](replace(config, shortcut_experts=True))
    ),
    "normed_residuals": _set(normed_residuals=NormedResidualConfig((1.5, 0.7), (0.8, 1.2), (1.1, 0.6))),
    "parallel_halves": _set(parallel_halves=True),
    "attention_scale": _set(attention_scale=0.8),
    "attention_windows": _set(attention_windows=(3, None, None, None)),
    "attention_chunks": _set(attention_chunks=(None, 4, None, None)),
    "layer_num_heads": _set(layer_num_heads=(2, 4, 4, 2)),
    "layer_kv_heads": _set(layer_kv_heads=(1, 2, 2, 1)),
    "layer_head_dims": _set(layer_head_dims=(8, 12, 12, 8), head_dim=12, attention_scale=0.3),
    "layer_ropes": _unrotated,
    "mlp_limits": _set(mlp_limits=(0.1, 0.2, 0.3, math.inf)),
    "attention_sinks": _set(attention_sinks=True),
    "sink_layers": _set(attention_sinks=True, sink_layers=(False, True, True, False)),
    "value_head_dim": _set(value_head_dim=5),
    "value_scale": _set(value_scale=1.7),
    "value_norm": _set(value_norm=True),
    "qkv_limit": _set(qkv_limit=0.3),
    "keys_as_values": _set(keys_as_values=(True, True, False, False)),
    "final_logit_softcap": _set(final_logit_softcap=2.0),
    "layer_scales": _set(layer_scales=True),
    "head_bias": _set(head_bias=True),
    "tie_word_embeddings": _set(tie_word_embeddings=True),
    "mla": _set(mla=_MLA, num_kv_heads=4, head_dim=10),
    "block_indexer": _set(block_indexer=BlockIndexerConfig(6, 2, 3, 1, frozenset({0, 2}))),
    "linear": _set(linear=_CONV),
    "compressed": _set(compressed=_COMPRESSED, num_kv_heads=1, head_dim=8),
    "hyper": _set(hyper=HyperConnectionConfig(2, 3, 1e-3)),
    "hyper with a rank": _set(hyper=HyperConnectionConfig(2, 0, 1e-3, rank=3), one_plus_weight_norms=True),
    "moe.own_norms": _moe(own_norms=True),
    "rope.interleaved": _rope(interleaved=True),
    "rope.query_growth": _rope(query_growth=0.5, query_growth_length=3.0),
}
# Sizes, names, and parts that change neither norms nor attention, nor layers.
OTHERS = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "head_dim"),
    *("num_kv_heads", "rms_norm_eps", "activation", "rope", "moe", "dtype", "max_model_len", "vision"),
    *("eos_token_ids", "bos_token_id", "num_mtp_layers", "mtp", "ngram", "unread_keys"),
    *("rounds_embedding_scale", "remarks"),
    "unrotated_query_growth_length",
}
# What the one family with compressed attention has besides; its tests compare it with transformers.
WITH_COMPRESSED = {
    *("embedding_scale", "logit_scale", "mlp_limits", "final_logit_softcap", "head_bias"),
    *("tie_word_embeddings", "hyper", "rope.interleaved", "rope.query_growth"),
    # Of any mixer: how its answer is added to the stream.
    *("input_norms", "output_norms", "moe_output_norms", "residual_scale", "layer_scales", "layer_halves"),
    *("normed_residuals", "parallel_halves", "moe.own_norms"),
}


def _logits(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the model computes in chunks, and what is written down of it. Raises as `build_model`."""
    model = build_model(config)
    expected = expected_names(model)
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape), requires_grad=False))
    weights: dict[str, torch.Tensor] = {}
    for name, target in sorted(expected.items()):
        values = torch.randn(target.shape, generator=generator) * 0.3
        if len(target.shape) == 1 and name.endswith("norm.weight"):
            values += 1.0
        weights[name] = values
        rows = target.module.get_parameter(target.parameter).data[target.begin :]
        rows[: target.rows.size].copy_(values)
    model.pack()
    runner = PagedRunner(model, ListedExperts(), num_pages=32)
    _, found = runner.prefill(PROMPT.tolist(), chunk=7)
    return found, WrittenModel(config, weights).logits(PROMPT)


@cache
def _single(name: str) -> torch.Tensor:
    found, written = _logits(SWITCHES[name](BASE))
    torch.testing.assert_close(found, written, rtol=1e-3, atol=1e-3)
    return found


def _refusal(config: ModelConfig) -> str:
    """Returns why the configuration is refused; empty: it is not."""
    try:
        check_switches(config)
    except ModelConfigError as error:
        return str(error)
    return ""


def _names_one(error: str, config: ModelConfig) -> bool:
    """Returns whether a refusal names one of the switches that are set."""
    active = {
        field.name for field in fields(config) if getattr(config, field.name) != getattr(BASE, field.name)
    }
    words = set(error.replace(",", " ").replace(":", " ").split())
    return bool(
        active & {word.removeprefix("moe.").split(".")[0] for word in words} | words & {"moe.own_norms"}
    )


@pytest.mark.parametrize("name", [name for name in SWITCHES if name != "compressed"])
def test_a_switch_alone_changes_what_is_written(name: str) -> None:
    """Each switch changes the answer, which for the base is another one, too."""
    base, written = _logits(BASE)
    torch.testing.assert_close(base, written, rtol=1e-3, atol=1e-3)
    assert (_single(name) - base).abs().max() > 1e-3


@pytest.mark.parametrize("first", SWITCHES)
def test_two_switches_are_computed_or_refused(first: str) -> None:
    """Each switch is tried with every later one: the answer is the written one, and neither
    switch's alone.
    """
    later = list(SWITCHES)[list(SWITCHES).index(first) + 1 :]
    for second in later:
        config = SWITCHES[second](SWITCHES[first](BASE))
        if "compressed" in (first, second) and WITH_COMPRESSED & {first, second}:
            build_model(config)
            continue
        refusal = _refusal(config)
        if refusal:
            assert _names_one(refusal, config), f"{first} and {second}: {refusal}"
            continue
        assert "compressed" not in (first, second), f"{first} and {second} have no reference"
        found, written = _logits(config)
        assert torch.allclose(found, written, rtol=1e-3, atol=1e-3), f"{first} and {second}: not as written"
        for name in (first, second):
            if config != SWITCHES[name](BASE):
                assert (found - _single(name)).abs().max() > 1e-4, f"{first} and {second}: as {name} alone"


def test_every_field_is_a_switch_or_none() -> None:
    """A new field has to be put to the test."""
    names = {field.name for field in fields(ModelConfig)}
    switches = {name for name in SWITCHES if "." not in name and " " not in name}
    assert switches | OTHERS == names
    assert not switches & OTHERS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_norm_full_width": True}, ("qk_norm_full_width", "no layer")),
        ({"qk_norm_after_rope": True}, ("qk_norm_after_rope", "no layer")),
        ({"norm_bias": True}, ("norm_bias", "no layer")),
        ({"sink_layers": (True,) * 4}, ("sink_layers", "no layer")),
        ({"layer_head_dims": (8,) * 4}, ("layer_head_dims", "attention_scale")),
        ({"value_head_dim": 9}, ("value_head_dim", "head_dim (8)")),
        (
            {"attention_windows": (3,) * 4, "attention_chunks": (4,) * 4},
            ("attention_windows", "attention_chunks", "in one layer"),
        ),
    ],
)
def test_a_switch_without_effect_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """By name, before a model is made."""
    with pytest.raises(ModelConfigError) as caught:
        build_model(replace(BASE, **changes))
    assert all(word in str(caught.value) for word in words)
