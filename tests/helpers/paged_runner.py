"""Drives a model over a paged KV cache without an engine: the caller decides every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_service.attention.registry import make_attention
from gpu_service.cache.kv_cache import make_cache
from gpu_service.cache.state_cache import make_states
from gpu_service.core.step import ForwardInputs
from gpu_service.experts.choice_samples import ChoiceSamples
from gpu_service.layers.context import ForwardContext
from gpu_service.loader.load import DenseForm, load_weights
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from moebius.models.config import ModelOverrides
from moebius.models.read import read_model_config
from tests.helpers.torch_experts import TorchExperts

# Each step of a request writes another one.
_NUM_STATES = 1024


@dataclass
class Decoding:
    """One request: its tokens, its pages in order, and how many tokens have their KV.

    `states`: of linear attention, slots of the states by number of tokens, where a step ended.
    """

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    states: dict[int, int] = field(default_factory=lambda: {0: 0})

    def shared(self, tokens: list[int], computed: int, page_size: int) -> Decoding:
        """Returns another request that starts from this one's first `computed` tokens, after which a step
        ended.
        """
        return Decoding(tokens, self.pages[: computed // page_size], computed, dict(self.states))


class PagedRunner:
    """Pages are handed out in a scattered order, so that no test passes by contiguity."""

    def __init__(self, model: CausalLM, experts: Any, *, page_size: int = 4, num_pages: int = 256) -> None:
        self.model = model
        self.kv_cache = make_cache(model.config.layers, num_pages, page_size, model.dtype)
        self.attention = make_attention(model.config.layers, self.kv_cache, "cpu")
        self.states = make_states(model.config.layers, _NUM_STATES, model.dtype)
        self._unused_states = iter(range(1, _NUM_STATES))
        self.experts = experts
        # None: what rows choose is not sampled.
        self.samples: ChoiceSamples | None = None
        self._free = [page for start in (1, 2, 3) for page in range(start, num_pages, 3)]

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Decoding, int]]) -> torch.Tensor:
        """Compute the next n tokens of each sequence together; logits `[sum(n), V]` of all rows."""
        logits = self.compute(self.inputs(work))
        for sequence, count in work:
            sequence.computed += count
        return logits

    @torch.inference_mode()
    def compute(self, inputs: ForwardInputs) -> torch.Tensor:
        """Returns the logits `[T, V]` of a step's rows."""
        self.attention.plan(inputs)
        states, samples = self.states, self.samples
        parts = inputs, self.kv_cache, self.attention, self.experts
        context = ForwardContext(*parts, states=states, samples=samples)
        return self.model.compute_logits(self.model(context)[inputs.logits_indices])

    def inputs(self, work: Sequence[tuple[Decoding, int]]) -> ForwardInputs:
        """Returns what a step of the next n tokens of each sequence reads; they are given pages."""
        page_size = self.kv_cache.page_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, count in work:
            span = range(sequence.computed, sequence.computed + count)
            while len(sequence.pages) * page_size < span.stop:
                sequence.pages.append(self._free.pop())
            ids += [sequence.tokens[p] for p in span]
            positions += span
            slots += [sequence.pages[p // page_size] * page_size + p % page_size for p in span]
            starts.append(starts[-1] + count)
        width = max(len(sequence.pages) for sequence, _ in work) + 1
        table = torch.zeros(len(work), width, dtype=torch.int32)
        for row, (sequence, _) in enumerate(work):
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
        seq_lens = [sequence.computed + count for sequence, count in work]
        reads = [sequence.states.get(sequence.computed, 0) for sequence, _ in work]
        if self.states is not None:
            for (sequence, _), length in zip(work, seq_lens, strict=True):
                sequence.states[length] = next(self._unused_states)
        writes = [
            sequence.states.get(length, 0) for (sequence, _), length in zip(work, seq_lens, strict=True)
        ]
        return ForwardInputs(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_table=table,
            query_start_loc=starts,
            seq_lens=seq_lens,
            logits_indices=torch.arange(len(ids)),
            query_start_loc_tensor=torch.tensor(starts, dtype=torch.int32),
            seq_lens_tensor=torch.tensor(seq_lens, dtype=torch.int32),
            state_reads=torch.tensor(reads),
            state_writes=torch.tensor(writes),
        )

    def prefill(self, tokens: Sequence[int], chunk: int | None = None) -> tuple[Decoding, torch.Tensor]:
        """Compute all tokens of a new sequence, `chunk` at a time; logits `[len(tokens), V]`."""
        sequence = Decoding(list(tokens))
        logits = []
        while (left := len(sequence.tokens) - sequence.computed) > 0:
            logits.append(self.step([(sequence, min(left, chunk or left))]))
        return sequence, torch.cat(logits)

    def greedy(self, sequences: Sequence[Decoding], logits: torch.Tensor, count: int) -> list[list[int]]:
        """Extend all sequences together by `count` greedy tokens; `logits` `[R, V]` choose the first ones."""
        start = [len(sequence.tokens) for sequence in sequences]
        for _ in range(count):
            for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
                sequence.tokens.append(token)
            logits = self.step([(sequence, 1) for sequence in sequences])
        return [
            sequence.tokens[first : first + count] for sequence, first in zip(sequences, start, strict=True)
        ]


def load_runner(
    directory: Path,
    *,
    overrides: ModelOverrides | None = None,
    experts: Any = None,
    page_size: int = 4,
    form: DenseForm = "dequantised",
    in_files: bool = False,
) -> PagedRunner:
    """Returns a runner on a checkpoint; its experts are the torch reference's unless a client is given."""
    model = build_model(read_model_config(directory, overrides))
    load_weights(model, directory, form, in_files=in_files)
    return PagedRunner(model, experts or TorchExperts(directory), page_size=page_size)
