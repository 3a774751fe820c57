"""What a model is with more layers at its end: those of multi-token prediction are decoder layers of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moebius.models.config import ModelConfig, MoeConfig

# Fields of `ModelConfig` with an entry for each layer, or none.
_PER_LAYER = (
    "layer_halves",
    "attention_windows",
    "attention_chunks",
    "layer_num_heads",
    "layer_ropes",
    "mlp_limits",
    "sink_layers",
    "layer_kv_heads",
    "layer_head_dims",
    "keys_as_values",
)


def like_last_layer(config: ModelConfig, count: int) -> ModelConfig:
    """`count` more layers, each as the last one is, but for its own choice of tokens, and with experts.

    None of them has linear attention.
    """
    added = range(config.num_layers, config.num_layers + count)
    changes: dict[str, Any] = {
        name: (*entries, *entries[-1:] * count) for name in _PER_LAYER if (entries := getattr(config, name))
    }
    mla = config.mla
    if mla is not None and mla.indexer is not None:
        indexer = replace(mla.indexer, layers=mla.indexer.layers | set(added))
        sources = (*mla.latent_sources, *added) if mla.latent_sources else ()
        mla = replace(mla, indexer=indexer, latent_sources=sources)
    return replace(
        config, num_layers=config.num_layers + count, moe=_with_experts(config.moe, added), mla=mla, **changes
    )


def _with_experts(moe: MoeConfig, added: range) -> MoeConfig:
    limits = (*moe.expert_limits, *moe.expert_limits[-1:] * len(added))
    return replace(moe, layers=moe.layers | set(added), expert_limits=limits)
