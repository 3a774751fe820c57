"""Layers' values for tests of one module or cache: what does not matter there is small."""

from __future__ import annotations

import torch

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.layers.composition import Composition
from moebius.models.config import MoeConfig
from moebius.models.layers.ffn import Dense, Experts, LatentMoE, MoE
from moebius.models.layers.latent import MLA, TokenIndexer
from moebius.models.layers.layer import Layer
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.residual import Sequential


def composition(
    hidden_size: int, dtype: torch.dtype = torch.float32, parallel: ParallelContext = SOLO
) -> Composition:
    """Returns what a module of so wide a model is made with."""
    return Composition(hidden_size, dtype, parallel)


def moe_value(config: MoeConfig, activation: str = "silu") -> MoE:
    """Returns the block of a layer that has experts by `config`."""
    width = config.shared_intermediate_size
    shared = Dense(intermediate_size=width, activation=activation) if width else None
    experts = Experts(config.intermediate_size, config.expert_activation)
    if config.latent_size:
        return LatentMoE(router=config.router, experts=experts, shared=shared, latent_size=config.latent_size)
    return MoE(router=config.router, experts=experts, shared=shared)


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
