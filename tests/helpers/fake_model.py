"""A model whose logits are a hash of the tokens and positions it finds in the paged KV cache.

A wrong page, slot, position or input token changes the hash of everything after it, hence the tokens.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.context import ForwardContext
from moebius.models.config import ModelConfig
from moebius.models.layers.rope import RopeConfig
from tests.helpers.layer_values import common_sizes

VOCAB = 97


def fake_config(vocab_size: int = VOCAB, max_model_len: int = 256) -> ModelConfig:
    """One layer, one KV head of two elements: token id + 1 (key) and position (value)."""
    common = common_sizes(
        model_type="fake",
        vocab_size=vocab_size,
        hidden_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_model_len=max_model_len,
        eos_token_ids=(0,),
    )
    return common.model(common.gqa(RopeConfig(theta=1e4, rotary_dim=2)), common.dense())


class NullAttention(AttentionBackend):
    """The fake model reads the cache itself."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Nothing is shared between layers."""

    def _attend(self, *arguments: object) -> torch.Tensor:
        """Never called."""
        raise AssertionError("the fake model has no attention")


class FakeModel:
    """`before_forward(call number)` may raise, block, or return a token whose rows become NaN."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.calls = 0
        self.batch_sizes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.before_forward: Callable[[int], None] = lambda call: None
        self.poison_token = -1

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Stores (token, position) at the new slots, then hashes each row's whole history: [T, 2] float64."""
        self.gate.wait(240)
        self.store(context, slice(None))
        self.calls += 1
        self.before_forward(self.calls)
        self.batch_sizes.append(len(context.inputs.seq_lens))
        return self.read(context)

    def store(self, context: ForwardContext, rows: slice) -> None:
        """Some of the step's rows into the cache."""
        inputs, slots = context.inputs, context.kv_cache.slots(0)
        slots[inputs.slot_mapping[rows], 0, 0] = (inputs.input_ids[rows] + 1).float()
        slots[inputs.slot_mapping[rows], 1, 0] = inputs.positions[rows].float()

    def read(self, context: ForwardContext) -> torch.Tensor:
        """Returns the hashes; all rows are stored."""
        inputs, cache = context.inputs, context.kv_cache
        slots, rows = cache.slots(0), []
        for index, seq_len in enumerate(inputs.seq_lens):
            pages = inputs.block_table[index, : -(-seq_len // cache.page_size)].long()
            history = cache.pages(0)[pages].reshape(-1, 2, 2)[:seq_len]
            ids, positions = history[:, 0, 0], history[:, 1, 0]
            count = inputs.query_start_loc[index + 1] - inputs.query_start_loc[index]
            halves = _hashes(ids.nan_to_num().long(), positions.nan_to_num().long())[seq_len - count :]
            # NaN anywhere in what a request reads spreads to it, as it would through attention.
            rows.append(halves if bool(torch.isfinite(ids + positions).all()) else halves * float("nan"))
        hidden = torch.cat(rows)
        poisoned = inputs.input_ids == self.poison_token
        if bool(poisoned.any()):
            hidden[poisoned] = float("nan")
            slots[inputs.slot_mapping[poisoned]] = float("nan")
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns pseudo-random logits in [-4, 4): [L, V] float32."""
        bad = torch.isnan(hidden_states).any(dim=1)
        clean = hidden_states.nan_to_num(0.0).long()
        state = clean[:, 0] | (clean[:, 1] << 32)
        values = _mix(state.unsqueeze(1) + torch.arange(self.vocab_size) * 7_919)
        logits = ((values >> 20) & 0xFFFF).float() / 8192 - 4
        logits[bad] = float("nan")
        return logits


class FakeStateModel(FakeModel):
    """The same texts from a state of each request, as layers without a cache have: the hash so far."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        # All but the state of zeros hold what no text has.
        self._states = torch.full((num_slots,), 1 << 40)
        self._states[0] = 0

    def read(self, context: ForwardContext) -> torch.Tensor:
        """From the states that the step reads; leaves those that it writes."""
        inputs = context.inputs
        reads, writes = inputs.state_reads, inputs.state_writes
        assert reads is not None
        assert writes is not None
        mixed = _mix((inputs.input_ids.long() + 1) * 1_000_003 + inputs.positions)
        hashes = torch.empty_like(mixed)
        for depth in inputs.depths:
            rows = depth.index
            hashes[rows] = self._states[reads[rows]] + mixed[rows]
            self._states[writes[rows]] = hashes[rows]
        starts = [] if inputs.depths else inputs.query_start_loc
        for request, (begin, end) in enumerate(itertools.pairwise(starts)):
            hashes[begin:end] = self._states[reads[request]] + mixed[begin:end].cumsum(0)
            self._states[writes[request]] = hashes[end - 1]
        return _halves(hashes)


def fake_answer(prompt: list[int], count: int) -> list[int]:
    """The `count` likeliest tokens after a prompt, one after the other."""
    model, tokens = FakeModel(), list(prompt)
    for _ in range(count):
        tokens.append(int(model.compute_logits(fake_hidden_states(tokens)[-1:]).argmax()))
    return tokens[len(prompt) :]


def fake_hidden_states(token_ids: list[int]) -> torch.Tensor:
    """What the model makes of a text, float64 `[T, 2]`."""
    return _hashes(torch.tensor(token_ids) + 1, torch.arange(len(token_ids)))


def _hashes(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns a digest of each token and all before it, float64 `[T, 2]`; `ids` are one more than the
    tokens'.
    """
    return _halves(_mix(ids * 1_000_003 + positions).cumsum(0))


def _halves(state: torch.Tensor) -> torch.Tensor:
    return torch.stack([state & 0xFFFFFFFF, (state >> 32) & 0x7FFFFFFF], dim=1).double()


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Returns a cheap 64-bit hash with wrap-around int64 arithmetic."""
    values = values * -7046029254386353131
    values = values ^ (values >> 29)
    values = values * -4658895280553007687
    return values ^ (values >> 32)


def fake_cache(num_pages: int, page_size: int) -> KVCache:
    """KV pages of the fake model."""
    return KVCache(fake_config().layers, num_pages, page_size, torch.float32)
