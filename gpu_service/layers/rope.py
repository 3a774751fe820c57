"""Rotary embedding of a model: frequencies fixed at build, tables made once per step."""

from __future__ import annotations

import torch

from gpu_service.model_config import RopeConfig
from gpu_service.ops.rope import RopeTable, rope_table
from gpu_service.ops.rope_frequencies import inverse_frequencies


class RotaryEmbedding:
    """Not a module: it holds no checkpoint tensor, so nothing of it may wait for the loader."""

    def __init__(self, config: RopeConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = inverse_frequencies(
            config.theta, config.rotary_dim, config.scaling_kind, dict(config.scaling)
        )
        self._frequencies = frequencies.to(device)
        self._dtype = dtype
        self._interleaved = config.interleaved
        self._attention_factor = config.attention_factor

    def table(self, positions: torch.Tensor) -> RopeTable:
        """Factors for int64 positions `[T]`, for all layers of the step."""
        return rope_table(
            positions, self._frequencies, self._dtype, self._interleaved, self._attention_factor
        )
