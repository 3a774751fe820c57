"""Embeddings of n-grams as DeepSeek-V4.1 adds them to its residual streams. Every rank has all of the layer,
but for the table.

Source: `Engram` in `inference/model.py` and `inference/engram.py` of the published model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gpu_service.core.step import ForwardInputs
from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.linear import Linear
from gpu_service.layers.ngrams import HashedNGrams, NGramRows
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.gated_streams import gate_values
from gpu_service.ops.ngrams import ngram_table
from moebius.checkpoint.token_kinds import read_token_kinds
from moebius.models.layers.layer import Places
from moebius.models.layers.ngrams import ENGRAM_GROUP, Engram


class EngramLayer(HashedNGrams):
    """Adds embedded n-grams to every stream, gated by how well they fit the stream.

    Hashed are kinds of tokens, which follow from the tokenizer. Attribute names are those of the checkpoint.
    """

    ends = False

    def __init__(self, spec: Engram, eps: float, own: RankWeights, places: Places, made: Composition) -> None:
        """`eps` is that of the norms."""
        super().__init__(spec.sizes, places, made.device)
        self._spec, self._eps = spec, eps
        self._vocab_size, self._hidden_size = made.vocab_size, made.hidden_size
        first_row = spec.table_part(made.parallel.tp_rank, made.parallel.tp_size).begin
        self.embed = NGramRows(own.under("embed"), first_row, made, ENGRAM_GROUP)
        self.wkv = Linear(own.under("wkv"))
        self.q_weight, self.k_weight = own.parameter("q_weight"), own.parameter("k_weight")
        # Of each token id, int64 `[vocab_size]`; filled by `pack`.
        self._kinds: torch.Tensor | None = None

    def pack(self) -> None:
        """Reads which tokens count as one. Raises CheckpointError as `read_token_kinds`."""
        spec = self._spec
        kinds = read_token_kinds(Path(spec.tokenizer), self._vocab_size, spec.num_kinds)
        self._kinds, self._end = torch.tensor(kinds, device=self._device), kinds[spec.sizes.end_token_id]
        self._table = ngram_table(spec.sizes, spec.place, spec.num_kinds, "cpu")
        super().pack()

    @property
    def table(self) -> NGramRows:
        return self.embed

    def hashed(self, inputs: ForwardInputs) -> ForwardInputs:
        assert self._kinds is not None, "the loader calls `pack`"
        return replace(inputs, input_ids=self._kinds[inputs.input_ids])

    def forward(self, streams: torch.Tensor, context: ForwardContext) -> None:
        """Streams `[T, N, H]` are added to in place, once `begin` was called in the step."""
        keys, values = self.wkv(self.embedded(context)).split((streams[0].numel(), self._hidden_size), dim=1)
        weights = self.k_weight, self.q_weight
        streams.add_(gate_values(keys.reshape(streams.shape), streams, values, *weights, self._eps))
