"""Attention of a forward that is captured in pieces: the host launches it between two of them.

What depends on how many requests a step has, and on how long they are, is in attention alone. So it is
planned and launched as in a step without graphs, for the step's own rows, and all else is captured for as
many rows as a graph is padded to. Storing keys and values is part of the graph: rows of padding store theirs
in the dummy page.
"""

from __future__ import annotations

from functools import partial

import torch

from gpu_service.attention.base import AttentionBackend, AttentionLayer
from gpu_service.core.step import ForwardInputs
from gpu_service.device.graphs import Cut


class AttentionBetweenGraphs(AttentionBackend):
    """What the layers of a forward see while it is captured, instead of the backend that computes.

    All layers leave their results in the same memory, which is no graph's.
    """

    def __init__(self, inner: AttentionBackend, max_rows: int) -> None:
        """`inner`: attends; it is planned before each replay. `max_rows`: of the largest graph."""
        self.mixers, self.kv_cache, self._choosing = inner.mixers, inner.kv_cache, []
        self._inner, self._num_rows = inner, 0
        self._cut: Cut = _no_launch
        # By width of a row. Rows of padding are zeros: what they lead to is stored in the dummy page, where
        # numbers that are not finite would poison sums that it is masked out of.
        widths = {mixer.num_heads * mixer.head_dim for mixer in self.mixers}
        dtype, device = self.kv_cache.dtype, self.kv_cache.device
        self._outputs = {
            width: torch.zeros((max_rows, width), dtype=dtype, device=device) for width in widths
        }

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return sum(output.nbytes for output in self._outputs.values())

    def plan(self, inputs: ForwardInputs) -> None:
        """`inputs`: those of the graph; they keep their memory for its life."""
        self._inputs = inputs

    def cut_at(self, cut: Cut) -> None:
        """Layers computed from now on end a piece; before, they attend to nothing."""
        self._cut = cut

    def end_capture(self) -> None:
        """The counterpart of `cut_at`."""
        self._cut = _no_launch

    def plan_rows(self, num_rows: int, size: int) -> None:
        """What is launched from now on is attention of the first `num_rows` rows of a graph of `size`."""
        self._num_rows = num_rows
        if num_rows < size:
            for output in self._outputs.values():
                output[num_rows:size].zero_()

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        rows, heads, head_dim = query.shape
        output: torch.Tensor = self._outputs[heads * head_dim][:rows]
        self._cut((query, key, value), partial(self._launch, output, layer_id, layer))
        return output

    def _launch(
        self,
        output: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        rows = self._num_rows
        if rows:
            own = output[:rows], query[:rows], key[:rows], value[:rows]
            self._inner.attend_into(*own, layer_id, layer)


def _no_launch(tensors: object, launch: object) -> None:
    """Nothing is recorded."""
