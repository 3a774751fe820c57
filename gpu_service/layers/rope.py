"""Rotary embedding of a model: frequencies fixed at build, tables made once per step."""

from __future__ import annotations

import torch

from gpu_service.model_config import RopeConfig
from gpu_service.ops.rope import RopeTable, rope_table
from gpu_service.ops.rope_frequencies import inverse_frequencies
from gpu_service.ops.rope_sections import section_axes


class RotaryEmbedding:
    """Not a module: it holds no checkpoint tensor, so nothing of it may wait for the loader."""

    def __init__(
        self, config: RopeConfig, max_model_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`max_model_len`: tokens of the longest sequence that is served.

        It alone chooses between LongRoPE's two sets of factors: keys stay in the cache as they were rotated,
        and one step holds sequences of all lengths, so that a set for each length would have none agree.
        """
        scaling, factors = dict(config.scaling), config.pair_factors
        is_long = bool(factors) and max_model_len > scaling["original_max_position_embeddings"]
        frequencies = inverse_frequencies(
            config.theta, config.rotary_dim, config.scaling_kind, scaling, factors[is_long] if factors else ()
        )
        # float32 [rotary_dim / 2], radians per token.
        self.frequencies = frequencies.to(device)
        self._dtype = dtype
        self._interleaved = config.interleaved
        self._attention_factor = config.attention_factor
        # int64 [rotary_dim / 2]; None: the model has one position a token.
        self._axes: torch.Tensor | None = None
        if config.mrope_sections:
            self._axes = section_axes(config.mrope_sections, config.mrope_interleaved).to(device)

    def table(self, positions: torch.Tensor) -> RopeTable:
        """Factors for all layers of the step.

        positions: int64 `[T]`; of a model with mRoPE also `[3, T]`, rows of time, height and width. Where
        these are equal, as in text, both give the same table bit by bit. Raises ValueError for `[3, T]`
        and a model without mRoPE.
        """
        if positions.dim() == 2:
            if self._axes is None:
                raise ValueError(f"positions {tuple(positions.shape)} need a model with mRoPE")
            positions = positions.index_select(0, self._axes).t()
        return rope_table(positions, self.frequencies, self._dtype, self._interleaved, self._attention_factor)
