"""Matrix products, alone and fused.

Modules here hold parameters on the `meta` device until the loader fills them; they state which
checkpoint names fill which rows, so that the loader needs no list of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gpu_service.ops.linear import can_pack, linear, pack_weight


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory; the loader gives it memory and values."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """`y = x W^T + b`; weight `[out_features, in_features]`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return linear(hidden_states, self.weight, self.bias)

    def pack(self) -> None:
        """Put the loaded weight into the device's fastest layout, in place of the plain one."""
        if can_pack(self.weight):
            self.weight = nn.Parameter(pack_weight(self.weight), requires_grad=False)


class FusedLinear(Linear):
    """Several projections of one input as one matrix product; their rows lie in the order of `parts`.

    The checkpoint stores each part under its own name beside this module's: `q_proj.weight`, ....
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype)
        self.parts = dict(parts)
