"""Embeddings of n-grams: how a step's tokens become numbers of rows, and a table's rows; see `ops.ngrams`."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.core.depths import at_depth
from gpu_service.core.step import ForwardInputs
from gpu_service.device.stream import page_lock
from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.rank_weights import RankWeights, empty_parameter
from gpu_service.layers.table_files import StoredRows, TableFiles, TableRead
from gpu_service.ops.ngrams import NGramTable, ngram_rows, table_rows
from moebius.models.layers.layer import Places
from moebius.models.layers.ngrams import NGramConfig


class NGramRows(nn.Module):
    """A layer's table of n-grams `[rows, row_dim]`, which checkpoints may store in equal parts.

    No other tensor of a model is nearly as large, and a token reads some rows only. So it stays in the host's
    memory, page-locked, where a GPU reads these rows itself, or in the checkpoint's files; a rank has an
    equal part of the table; and stored in 8 bits with one scale, or with scales of each row, it stays so.
    """

    def __init__(self, own: RankWeights, first_row: int, made: Composition, scale_columns: int = 0) -> None:
        """`first_row`: of the rank's part; `scale_columns`: of a row that share a scale, 0: all values do."""
        super().__init__()
        self._scale_columns = scale_columns
        self.weight, self._first_row = own.parameter("weight"), first_row
        # The one scale, float32 `[1]`, or those of rows, uint8 `[rows, row_dim / scale_columns]`.
        self.weight_scale: nn.Parameter | None = None
        self.scale: nn.Parameter | None = None
        # None: the table is in memory.
        self.files: TableFiles | None = None
        self._dtype, self._device = made.dtype, made.device
        self._group = made.parallel.tensor_group

    def pack(self) -> None:
        """Lets the GPU read the table; the loader calls it once."""
        if self._device.type == "cuda":
            page_lock(self.weight, self._device, "the table of n-grams")
            if self.scale is not None:
                page_lock(self.scale, self._device, "the scales of the table of n-grams")

    def keep_fp8(self) -> None:
        """See `linear.Scaled`."""
        rows, size = self.weight.shape
        self.weight = empty_parameter(rows, size, dtype=torch.float8_e4m3fn)
        if self._scale_columns:
            self.scale = empty_parameter(rows, size // self._scale_columns, dtype=torch.uint8)
        else:
            self.weight_scale = empty_parameter(1, dtype=torch.float32)

    def leave_in_files(self, weight: StoredRows, scale: StoredRows | None) -> None:
        """Reads rows from files, and has no memory for the table; the loader calls it instead of filling.

        Raises CheckpointError as `TableFiles`.
        """
        self.files = TableFiles([weight] if scale is None else [weight, scale])
        self.weight = _without_rows(self.weight)
        if self.scale is not None:
            self.scale = _without_rows(self.scale)

    def begin(self, rows: torch.Tensor) -> torch.Tensor | TableRead:
        """Begins to read the rows int64 `[T, n]` of a step, where they have to be read; `forward` ends it."""
        own = rows - self._first_row if self._first_row else rows
        return own if self.files is None else self.files.begin(own)

    def forward(self, begun: torch.Tensor | TableRead) -> torch.Tensor:
        """Returns `[T, n, row_dim]` of what `begin` returned: each row from the rank that has it, zeros from
        others.

        Raises CheckpointError as `TableRead.found`.
        """
        scale = self.weight_scale if self.scale is None else self.scale
        if isinstance(begun, torch.Tensor):
            found = table_rows(begun, self.weight, scale, self._dtype)
        else:
            rows, (weight, *scales) = begun.found()
            found = table_rows(rows, weight, scales[0] if scales else scale, self._dtype)
        return self._group.all_reduce(found)


def _without_rows(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(
        torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device="cpu"), requires_grad=False
    )


class HashedNGrams(nn.Module):
    """How tokens and those before them are hashed; the subclass fills in the table and the end token."""

    ends: bool = True  # Whether no n-gram reaches beyond the end token.
    _end = 0

    def __init__(self, sizes: NGramConfig, places: Places, device: torch.device) -> None:
        super().__init__()
        assert places.state is not None
        self._state, self._sizes, self._device = places.state, sizes, device
        self._table: NGramTable | None = None

    @property
    def table(self) -> NGramRows:
        """The rows that are embedded."""
        raise NotImplementedError

    def pack(self) -> None:
        """Puts what was computed to the weights; the loader calls it once."""
        assert self._table is not None
        self._table = NGramTable(*(numbers.to(self._device) for numbers in self._table))

    def hashed(self, inputs: ForwardInputs) -> ForwardInputs:
        """Returns the step with what is hashed of its tokens."""
        return inputs

    def begin(self, context: ForwardContext) -> None:
        """Hashes a step's tokens, whose states are then in their slots, and begins to read their rows. The
        backbone calls it at the step's begin.
        """
        assert context.states is not None, "a model that embeds n-grams needs states"
        rows = self.rows(self.hashed(context.inputs), context.states.of(self._state)[0])
        context.begun_rows[self] = self.table.begin(rows)

    def embedded(self, context: ForwardContext) -> torch.Tensor:
        """Returns the rows of each token, one after another, `[T, embed_dim]`; once for each `begin`.

        Raises CheckpointError as `NGramRows.forward`.
        """
        found: torch.Tensor = self.table(context.begun_rows.pop(self))
        return found.flatten(1)

    def rows(self, inputs: ForwardInputs, tokens: torch.Tensor) -> torch.Tensor:
        """Returns what `ngram_rows` does; tokens: all slots of the layer's latest tokens."""
        if not inputs.depths:
            return self._rows(inputs, tokens)
        rows = torch.cat([self._rows(at_depth(inputs, depth), tokens) for depth in inputs.depths])
        order = torch.cat([depth.index for depth in inputs.depths])
        return torch.empty_like(rows).index_copy_(0, order, rows)

    def _rows(self, inputs: ForwardInputs, tokens: torch.Tensor) -> torch.Tensor:
        assert self._table is not None
        assert inputs.state_reads is not None
        assert inputs.state_writes is not None
        return ngram_rows(
            inputs.input_ids,
            inputs.positions,
            tokens,
            inputs.state_reads,
            inputs.state_writes,
            inputs.query_start_loc_tensor,
            *self._table,
            self._end,
            self.ends,
        )
