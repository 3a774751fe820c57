"""Layers' values for tests of one module or cache: what does not matter there is small."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.layers.composition import Composition
from gpu_service.layers.rank_weights import RankWeights
from moebius.models.common import Common
from moebius.models.config import ModelConfig, ModelOverrides
from moebius.models.layers.ffn import Dense, Experts, LatentMoE, MoE
from moebius.models.layers.latent import MLA, TokenIndexer
from moebius.models.layers.layer import Layer, mixers
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.residual import Sequential
from moebius.models.layers.router import RouterConfig
from moebius.models.layers.weights import Weight
from moebius.models.read import read_model_config

M = TypeVar("M", bound=Mixer)


def composition(
    hidden_size: int, dtype: torch.dtype = torch.float32, parallel: ParallelContext = SOLO
) -> Composition:
    """Returns what a module of so wide a model is made with."""
    return Composition(hidden_size, dtype, parallel)


def declared(weights: Iterable[Weight], dtype: torch.dtype = torch.float32) -> RankWeights:
    """Returns weights of activations of that type as the only rank has them."""
    return RankWeights(weights, dtype)


def common_sizes(**changes: Any) -> Common:
    """What a small model's config.json says; `changes`: fields of `Common`."""
    values: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "vocab_size": 10,
        "hidden_size": 12,
        "intermediate_size": 5,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "eps": 1e-5,
        "activation": "silu",
        "dtype": "float32",
        "max_model_len": 256,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_ids": (),
        "bos_token_id": None,
    }
    return Common(**(values | changes))


def moe_value(
    router: RouterConfig, width: int, shared: int = 0, activation: str = "silu", latent_size: int = 0
) -> MoE:
    """A block of experts that are `width` wide, beside always active ones that are `shared` wide."""
    active = Dense(intermediate_size=shared, activation=activation) if shared else None
    experts = Experts(width, activation)
    if latent_size:
        return LatentMoE(router=router, experts=experts, shared=active, latent_size=latent_size)
    return MoE(router=router, experts=experts, shared=active)


def latent_layers(
    count: int, latent_dim: int, rope_dim: int, index_dims: tuple[int, ...] = ()
) -> list[Layer]:
    """Returns the layers that cache latents; `index_dims`: elements of the keys that the first ones choose
    by.
    """

    def layer(index: int) -> Layer:
        indexer = None
        if index < len(index_dims):
            indexer = TokenIndexer(num_heads=1, head_dim=index_dims[index], top_k=1, interleaved=False)
        mixer = MLA(
            num_heads=1,
            q_lora_rank=8,
            kv_lora_rank=latent_dim,
            qk_nope_head_dim=8,
            qk_rope_head_dim=rope_dim,
            v_head_dim=8,
            softmax_scale=1.0,
            rope=None,
            is_sparse=bool(index_dims),
            indexer=indexer,
        )
        dense = Dense(intermediate_size=8, activation="silu")
        return Layer(mixer, dense, RMSNorm(1e-6), Sequential())

    return [layer(index) for index in range(count)]


def read_config(
    directory: Path, base: dict[str, Any], overrides: ModelOverrides | None = None, **changes: Any
) -> ModelConfig:
    """Returns what a config.json with these keys means; without those that change to "absent"."""
    values = {key: value for key, value in (base | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory, overrides)


def mixers_of(config: ModelConfig, kind: type[M]) -> list[M]:
    """The mixers of a kind, in order."""
    return [mixer for mixer in mixers(config.layers) if isinstance(mixer, kind)]


def first(config: ModelConfig, kind: type[M]) -> M:
    """The first mixer of a kind."""
    return mixers_of(config, kind)[0]


def shared_width(config: ModelConfig) -> int:
    """The width of always active experts together, 0 where there are none."""
    shared = first_moe(config).shared
    return 0 if shared is None else shared.intermediate_size


def layers_of(config: ModelConfig, kind: type[Mixer]) -> frozenset[int]:
    """The numbers of the layers whose mixers are of a kind."""
    return frozenset(i for i, layer in enumerate(config.layers) if isinstance(layer.mixer, kind))


def router_of(config: ModelConfig) -> RouterConfig:
    """The router of the first layer that has experts."""
    return next(iter(config.routed.values())).router


def first_moe(config: ModelConfig) -> MoE:
    """The block of the first layer that has experts."""
    moe = next(iter(config.routed.values()))
    assert isinstance(moe, MoE)
    return moe


def with_mixers(config: ModelConfig, *found: Mixer) -> ModelConfig:
    """The model whose layers, like its first one, have these mixers."""
    return replace(config, layers=tuple(replace(config.layers[0], mixer=mixer) for mixer in found))
