"""DeepSeek-V3.2, GLM-5 and GLM-5.2: DeepSeek-V3 whose layers attend to the tokens that an indexer chooses."""

from __future__ import annotations

import torch

from gpu_service.layers.mla import Indexer, MLAttention, StepSelection
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import shard_config


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose either family: which layers choose, and how keys are rotated, the configuration says."""
    mla, selection = shard_config(config, parallel).mla, StepSelection()
    assert mla is not None, "the family's reader fills `mla`"
    assert mla.indexer is not None, "the family's reader fills `indexer`"
    index_layers = {layer: index for index, layer in enumerate(sorted(mla.indexer.layers))}

    def attention(layer_id: int) -> MLAttention:
        index, indexer = index_layers.get(layer_id), None
        if index is not None:
            indexer = Indexer(index, config, selection, dtype=dtype)
        return MLAttention(
            layer_id,
            config,
            bias=config.attention_bias,
            dtype=dtype,
            parallel=parallel,
            indexer=indexer,
            selection=selection,
        )

    return build_causal_lm(config, attention, dtype=dtype, device=device, parallel=parallel)
