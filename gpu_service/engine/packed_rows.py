"""Where graphs have a step's rows in packed memory, and how these are written there.

Written for every step, so on arrays: a torch operation of the host takes several times as long.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_service.core.step import Dummy, Feature, StepPlan, TensorField, captured_fields, graph_rows
from gpu_service.device.stream import packed_offsets

_PackedField = tuple[str, slice, np.dtype[Any], tuple[int, ...], int, int | None]


def token_fields(features: Collection[Feature]) -> dict[str, TensorField]:
    """Returns those of `captured_fields` with an entry a token: what layers outside attention read."""
    fields = captured_fields(features)
    return {name: declared for name, declared in fields.items() if declared.shape.split()[-1] == "T"}


def graph_tokens(rows: Mapping[str, torch.Tensor], size: int, input_ids: torch.Tensor) -> StepPlan:
    """Returns the step whose layers a graph of `size` tokens computes, on the memory of `token_fields`.

    It has no requests: who reads something about them while a graph is captured must not be in one.
    """
    none = input_ids[:0]
    own = dict[str, Any](rows)
    absent = {"block_table": none.view(0, 0).int()}
    absent |= {name: none.int() for name in ("seq_lens_tensor", "query_start_loc_tensor")}
    absent |= dict.fromkeys(("logits_indices", "sample_slots", "sample_positions"), none)
    lists: dict[str, Any] = {
        name: [] for name in ("query_start_loc", "seq_lens", "uploads", "sample_batch_indices")
    }
    return StepPlan(input_ids=input_ids[:size], **own, **dict[str, Any](absent), **lists)


class PackedTokens:
    """Tensors of a graph of one size whose last axis are rows of the forward."""

    def __init__(self, fields: Mapping[str, TensorField], size: int, dummies: Mapping[Dummy, int]) -> None:
        rows = graph_rows(fields, size, dummies)
        offsets, self._end = packed_offsets(list(rows.values()))
        self._size = size
        # Of each field its name, place and shape, what rows of padding hold, and what others do.
        self._fields: list[_PackedField] = []
        for (name, tensor), begin in zip(rows.items(), offsets, strict=True):
            declared, array = fields[name], tensor.numpy()
            padding = declared.padding
            value = dummies[padding] if isinstance(padding, Dummy) else padding
            place = slice(begin, begin + array.nbytes)
            self._fields.append((name, place, array.dtype, array.shape, value, declared.valid))
        # Of each array that was written to, by its identity: itself, and the fields' rows in it.
        self._views: dict[int, tuple[npt.NDArray[np.uint8], list[npt.NDArray[Any]]]] = {}

    @property
    def end(self) -> int:
        """Bytes from the first tensor's begin to the last one's end."""
        return self._end

    def write_tokens(self, plan: StepPlan, count: int, memory: npt.NDArray[np.uint8]) -> None:
        """Writes a step's `count` rows, then padding, as `graph_rows` returns them."""
        is_padded = count < self._size
        if id(memory) not in self._views:
            views = [memory[place].view(dtype).reshape(shape) for _, place, dtype, shape, *_ in self._fields]
            self._views[id(memory)] = memory, views
        _, views = self._views[id(memory)]
        for (name, *_, padding, valid), rows in zip(self._fields, views, strict=True):
            if is_padded:
                rows[..., count:] = padding
            rows[..., :count] = getattr(plan, name).numpy() if valid is None else valid


class PackedRows(PackedTokens):
    """The same of a graph whose rows are a request each, with the requests' pages."""

    def __init__(self, fields: Mapping[str, TensorField], size: int, dummies: Mapping[Dummy, int]) -> None:
        assert list(fields)[-1] == "block_table", (
            "nothing may follow what is as wide as the step's longest request"
        )
        super().__init__({name: fields[name] for name in list(fields)[:-1]}, size, dummies)
        self._pages_at = self._end

    def nbytes(self, num_pages: int) -> int:
        """Returns the bytes that rows with `num_pages` columns of pages take."""
        return self._pages_at + self._size * num_pages * 4

    def write(self, plan: StepPlan, memory: npt.NDArray[np.uint8]) -> None:
        """Writes a step's rows and pages, then padding, as `graph_rows` returns them."""
        count = plan.num_requests
        self.write_tokens(plan, count, memory)
        width = plan.block_table.shape[1]
        pages = memory[self._pages_at : self.nbytes(width)].view(np.int32).reshape(self._size, width)
        pages[:count] = plan.block_table.numpy()
        pages[count:] = 0

    def pages(self, memory: torch.Tensor, width: int) -> torch.Tensor:
        """Returns the block table in int32 `memory`, `[size, width]`."""
        return memory.as_strided((self._size, width), (width, 1), self._pages_at // 4)
