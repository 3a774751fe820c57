"""mRoPE: which of a token's three positions (time, height, width) each rotary pair turns by.

Sources: Qwen2-VL (arXiv:2409.12191) for sections that follow one another, Qwen3-VL for alternating ones.
"""

from __future__ import annotations

import torch

# Time, height, width.
NUM_AXES = 3


def section_axes(sections: tuple[int, ...], interleaved: bool) -> torch.Tensor:
    """The axis of each pair, int64 `[num_pairs]` on the CPU; `sections` are the axes' numbers of pairs.

    Interleaved, pair j turns by axis j % 3 while that axis still has pairs (one in three), then by time.
    Raises ValueError unless there are three sections.
    """
    if len(sections) != NUM_AXES:
        raise ValueError(f"{len(sections)} sections {sections}; mRoPE has {NUM_AXES}")
    axes = torch.arange(NUM_AXES, device="cpu")
    sizes = torch.tensor(sections, device="cpu")
    if not interleaved:
        return axes.repeat_interleave(sizes)
    pairs = torch.arange(sum(sections), device="cpu")
    turn = pairs % NUM_AXES
    return torch.where(pairs < NUM_AXES * sizes[turn], turn, 0)
