"""Arguments for every op: what a backend is tried with before it is trusted, and tests compare on.

Small ones, or of a model's own sizes, by which kernels are compiled and decide whether they fit on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_service.ops.example_sizes import SMALL, SMALL_NGRAMS, Sizes
from gpu_service.ops.linear import GROUP
from gpu_service.ops.linear_attention import Sequences, make_sequences
from gpu_service.ops.ngrams import ngram_table
from gpu_service.ops.packed_weight import PackedPart
from gpu_service.ops.panel_linear import panel_parts
from gpu_service.ops.rope import RopeTable, rope_table
from gpu_service.ops.rope_frequencies import inverse_frequencies


class _Maker:
    """Makes arguments on a device, for activations of a dtype; random, the same every time."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
        self._device, self._dtype, self._sizes = device, dtype, sizes

    def norm(self) -> tuple[Any, ...]:
        width = self._sizes.hidden
        return self._random(self._sizes.tokens, width), self._random(width), 1e-6

    def fused_add(self) -> tuple[Any, ...]:
        rows, weight, eps = self.norm()
        return rows, rows.flip(0).contiguous(), weight, eps

    def rope_table(self) -> tuple[Any, ...]:
        positions = torch.arange(self._sizes.tokens, device=self._device) * 1001
        frequencies = inverse_frequencies(1e4, self._sizes.rotary_dim, "default", {}).to(self._device)
        return positions, frequencies, self._dtype, self._sizes.interleaved

    def apply_rope(self) -> tuple[Any, ...]:
        return self._heads(), self._table()

    def qk_norm_rope(self) -> tuple[Any, ...]:
        weight = self._random(self._sizes.head_dim)
        return self._heads(), weight, weight.flip(0).contiguous(), 1e-6, self._sizes.queries, self._table()

    def gate_up(self) -> tuple[Any, ...]:
        return (self._random(self._sizes.tokens, 2 * self._sizes.intermediate),)

    def clamped_gate_up(self) -> tuple[Any, ...]:
        return *self.gate_up(), 1.702, 0.5

    def attended_gates(self) -> tuple[Any, ...]:
        values, gates = self._random(self._sizes.tokens, 2 * self._sizes.intermediate).chunk(2, dim=1)
        return values.contiguous(), gates

    def append_kv(self) -> tuple[Any, ...]:
        tokens, keys, head_dim = self._sizes.tokens, self._sizes.keys, self._sizes.head_dim
        slots = torch.zeros(2 * tokens + 2, 2 * keys, head_dim, device=self._device, dtype=self._dtype)
        rows = self._random(tokens, 2 * keys, head_dim)
        mapping = 2 * torch.arange(tokens, device=self._device).flip(0) + 1
        return slots.to(self._sizes.storage or self._dtype), rows[:, :keys], rows[:, keys:], mapping

    def rotate_and_append(self) -> tuple[Any, ...]:
        slots, _, value, mapping = self.append_kv()
        return *self.qk_norm_rope(), value, slots, mapping

    def pool_keys(self) -> tuple[Any, ...]:
        """Returns pages of 4 tokens and pools of 6: one ends in the first request's rows, and both of the
        second.
        """
        pool, size, page_size = 6, self._sizes.index_dim, 4
        slots, offsets = self._random(16 * page_size, 2 * size), self._random(pool, size, dtype=torch.float32)
        table = torch.arange(1, 9, dtype=torch.int32, device=self._device).view(2, 4)
        positions = torch.tensor([4, 5, 6, 11], device=self._device)
        mapping = torch.tensor([8, 9, 10, 8 * page_size - 1], device=self._device)
        starts = torch.tensor([0, 3, 4], dtype=torch.int32, device=self._device)
        return slots, offsets, positions, mapping, table, starts, page_size

    def block_scores(self) -> tuple[Any, ...]:
        """Returns pages of 4 tokens and blocks of 6: a chunk, then a single token, from the chunk's second
        row on.
        """
        size, page_size = self._sizes.index_dim, 4
        query, pages = self._random(3, self._sizes.keys, size), self._random(16, page_size, size)
        table = torch.arange(1, 9, dtype=torch.int32, device=self._device).view(2, 4)
        positions = torch.tensor([5, 6, 11], device=self._device)
        starts = torch.tensor([0, 3, 4], dtype=torch.int32, device=self._device)
        return query, pages, positions, table, starts, 6, 2, 1, False

    def mean_block_scores(self) -> tuple[Any, ...]:
        """Returns the same; rows of pages hold more than a key."""
        _, pages, *rest = self.block_scores()
        size = self._sizes.index_dim
        return self._random(3, 5, size), torch.cat((pages, pages[..., :4]), dim=2), *rest

    def absorb_query(self) -> tuple[Any, ...]:
        """Returns parts of queries, and the rows of keys among a head's rows of keys and values."""
        heads, size, latent = self._sizes.queries, self._sizes.head_dim, self._sizes.latent_dim
        weight = self._random(heads, 2 * size, latent) * size**-0.5
        return self._random(self._sizes.tokens, heads, size + 8)[..., :size], weight[:, :size]

    def project_values(self) -> tuple[Any, ...]:
        query, weight = self.absorb_query()
        return self._random(query.shape[0], *weight.shape[::2]), weight

    def mean_keys(self) -> tuple[Any, ...]:
        """Returns what `pool_keys` does; some elements of a key are rotated."""
        slots, offsets, *rest = self.pool_keys()
        size = self._sizes.index_dim
        return slots[:, : size + 8].contiguous(), offsets[0], 1e-6, offsets.shape[0], *rest

    def conv_update(self) -> tuple[Any, ...]:
        return self._conv(3)

    def conv_extend(self) -> tuple[Any, ...]:
        sequences = self._sequences()
        return *self._conv(sequences.neighbours[-1].rows.stop), sequences

    def delta_update(self) -> tuple[Any, ...]:
        return self._delta(3)

    def delta_extend(self) -> tuple[Any, ...]:
        sequences = self._sequences()
        return *self._delta(sequences.neighbours[-1].rows.stop), sequences

    def state_space_update(self) -> tuple[Any, ...]:
        return self._state_space(3)

    def state_space_extend(self) -> tuple[Any, ...]:
        sequences = self._sequences()
        return *self._state_space(sequences.neighbours[-1].rows.stop), sequences

    def scan_update(self) -> tuple[Any, ...]:
        return self._scan(3)

    def scan_extend(self) -> tuple[Any, ...]:
        sequences = self._sequences()
        return *self._scan(sequences.neighbours[-1].rows.stop), sequences

    def gated_group_norm(self) -> tuple[Any, ...]:
        tokens, linear = self._sizes.tokens, self._sizes.linear
        size, gate = linear.value_size, self._random(tokens, linear.value_size + 4)[:, 4:]
        values = self._random(tokens, size, dtype=torch.float32)
        return values, gate, self._random(size), linear.num_key_heads, 1e-6

    def kimi_update(self) -> tuple[Any, ...]:
        return self._kimi(3)

    def kimi_extend(self) -> tuple[Any, ...]:
        sequences = self._sequences()
        return *self._kimi(sequences.neighbours[-1].rows.stop), sequences

    def gated_norm(self) -> tuple[Any, ...]:
        tokens, linear = self._sizes.tokens, self._sizes.linear
        heads, size = linear.num_value_heads, linear.value_head_dim
        gate = self._random(tokens, (heads + 1) * size)[:, size:]
        return self._random(tokens, heads, size), gate, self._random(size), 1e-6

    def collapse(self) -> tuple[Any, ...]:
        streams, hyper = self._streams(), self._sizes.hyper
        num, columns = streams.shape[1], streams[0].numel()
        rows, kinds = ((2 + num) * num, 3) if hyper.iterations else (2 * num, 2)
        projection = self._random(rows, columns, dtype=torch.float32) * columns**-0.5
        base, scale = self._random(rows, dtype=torch.float32), self._random(kinds, dtype=torch.float32)
        given = self._random(len(streams), num, dtype=torch.float32) if hyper.lags else None
        return streams, projection, base, scale, 1e-6, hyper.eps, hyper.iterations, hyper.magnitude, given

    def mix(self) -> tuple[Any, ...]:
        """Returns the update as experts leave it."""
        streams = self._streams()
        tokens, num, size = streams.shape
        mixed = num if self._sizes.hyper.iterations else 0
        post = self._random(tokens, num, dtype=torch.float32)
        comb = self._random(tokens, mixed, mixed).float()
        return self._random(tokens, size, dtype=torch.float32), streams, post, comb

    def stream_norm(self) -> tuple[Any, ...]:
        streams = self._streams()
        return streams, self._random(*streams.shape[1:], dtype=torch.float32), 1e-6

    def gated_mix(self) -> tuple[Any, ...]:
        streams = self._streams()
        return streams.flatten(1).flip(1).contiguous(), streams

    def inject(self) -> tuple[Any, ...]:
        """Next to the bottleneck that one projection makes with it."""
        update, streams, *_ = self.mix()
        return update, streams, self._random(streams.shape[0], streams.shape[1] + 4)[:, 4:]

    def gate(self) -> tuple[Any, ...]:
        streams, weight, eps = self.stream_norm()
        # Columns of one product.
        tokens, num, size = streams.shape
        product = self._random(tokens, (num + 1) * size)
        keys, values = product[:, : num * size].view(streams.shape), product[:, num * size :]
        return keys, streams, values, weight, weight.flip(0).contiguous(), eps

    def ngrams(self) -> tuple[Any, ...]:
        """Returns a token, a chunk at the beginning of its request and one in the middle; some end a text."""
        starts, device = [0, 1, 6, 8], self._device
        positions = torch.tensor([9, *range(5), 30, 31], device=device)
        ids, states = (self._random(*shape, dtype=torch.float32) * 3 for shape in ((8,), (5, 2)))
        tokens = ids.long().abs(), positions, states.long().abs()
        table = ngram_table(SMALL_NGRAMS, 1, self._sizes.vocabulary, device)[:3]
        return *tokens, *self._slots(), torch.tensor(starts, dtype=torch.int32, device=device), *table, 2

    def table_rows(self) -> tuple[Any, ...]:
        """Returns arguments for a table in the host's memory, which has not all of the rows."""
        rows = torch.tensor([[0, 11, 7], [12, -1, 3]], device=self._device)
        table = self._random(12, 20)
        if table.device.type == "cuda":
            table = table.cpu().pin_memory()
        return rows, table, None, table.dtype

    def _streams(self) -> torch.Tensor:
        return self._random(self._sizes.tokens, self._sizes.hyper.num_streams, self._sizes.hidden)

    def route(self) -> tuple[Any, ...]:
        router = self._sizes.router
        bias = self._random(router.num_choices, dtype=torch.float32) if router.correction_bias else None
        logits_dtype = torch.float32 if router.float32_gate else self._dtype
        return self._random(self._sizes.tokens, router.num_choices, dtype=logits_dtype), bias, router

    def choose_by_kind(self) -> tuple[Any, ...]:
        """Returns choices of two kinds of five experts, in three parts and in one; a third of the tokens is
        of the second.
        """
        tokens, top_k = self._sizes.tokens, min(4, self._sizes.router.top_k)
        ids = torch.arange(tokens * top_k, dtype=torch.int32, device=self._device).view(tokens, top_k) % 5
        ids[-1] = -1
        weights = self._random(tokens, top_k, dtype=torch.float32).abs()
        input_ids = torch.arange(tokens, device=self._device) % 6
        second = torch.tensor([1, 4], device=self._device)
        return input_ids, second, (weights, ids), (weights.flip(0), (4 - ids).clamp(max=4)), 5, (3, 1)

    def zero_experts(self) -> tuple[Any, ...]:
        """About half of the choices have no weights, and a row of padding chose no expert."""
        tokens, top_k = self._sizes.tokens, self._sizes.router.top_k
        weights = self._random(tokens, top_k, dtype=torch.float32).abs()
        ids = torch.arange(tokens * top_k, dtype=torch.int32, device=self._device).view(tokens, top_k) % 6
        ids[-1] = -1
        return self._random(tokens, self._sizes.hidden), weights, ids, 3

    def fp8_linear(self) -> tuple[Any, ...]:
        outputs, columns, first = 72, self._sizes.fp8_columns, self._sizes.fp8_first_column
        weight = self._random(outputs, columns, dtype=torch.float32).to(torch.float8_e4m3fn)
        scales = self._random(outputs, -(-(first + columns) // GROUP), dtype=torch.float32).abs()
        return self._random(self._sizes.tokens, columns), weight, scales, first, self._random(outputs)

    def linear(self) -> tuple[Any, ...]:
        weight = self._random(72, self._sizes.hidden) * self._sizes.hidden**-0.5
        return self._random(self._sizes.tokens, self._sizes.hidden), weight, self._random(72)

    def panel_linear(self) -> tuple[Any, ...]:
        """Returns 72 outputs of 4 bits; a model's own formats are compiled once they are loaded."""
        parts = panel_parts(self._sizes.hidden, (PackedPart("int4_g32_f16", 72),))
        (part,) = parts
        panels = (torch.arange(part.nbytes) * 37 % 251).to(torch.uint8).view(part.num_panels, -1)
        panels[:, part.panels.scales_offset :].view(torch.float16)[:] = 2**-6
        bias = self._random(part.rows)
        rows = self._random(self._sizes.tokens, self._sizes.hidden)
        return rows, panels.flatten().to(self._device), parts, bias

    def panel_rows(self) -> tuple[Any, ...]:
        _, memory, parts, _ = self.panel_linear()
        return torch.tensor([0, 71, 16], device=self._device), memory, parts, self._dtype

    def add_norm_linear(self) -> tuple[Any, ...]:
        """Returns the logits of a router, after experts' sum."""
        router, (rows, residual, *norm) = self._sizes.router, self.fused_add()
        dtype = torch.float32 if router.float32_gate else self._dtype
        return (
            residual,
            rows.float(),
            *norm,
            self._random(router.num_choices, rows.shape[1], dtype=dtype),
            None,
        )

    def add_norm_route(self) -> tuple[Any, ...]:
        logits, bias, router = self.route()
        return *self.add_norm_linear(), bias, router, logits[:, 0] < 10

    def logits(self) -> tuple[Any, ...]:
        return (self._random(3, self._sizes.vocabulary, dtype=torch.float32),)

    def masks(self) -> tuple[Any, ...]:
        (logits,) = self.logits()
        words = self._random(2, -(-self._sizes.vocabulary // 32), dtype=torch.float32) * 2**30
        return logits, torch.tensor([2, 0], device=self._device), words.to(torch.int32)

    def overflow(self) -> tuple[Any, ...]:
        total = self._random(4, self._sizes.hidden)
        total[1, 7], total[2, 0] = torch.inf, torch.nan
        first = torch.tensor([2**31 - 1, 2**31 - 1, 3, 2**31 - 1], dtype=torch.int32, device=self._device)
        update = self._random(4, self._sizes.hidden, dtype=torch.float32)
        update[3, -1] = torch.finfo(total.dtype).max
        total[3, -1] = torch.finfo(total.dtype).max
        return first, total, update, 5

    def truncate(self) -> tuple[Any, ...]:
        probabilities = self._random(3, self._sizes.vocabulary, dtype=torch.float32).softmax(dim=-1)
        top_k = torch.tensor([0, 50, 7], device=self._device)
        top_p = torch.tensor([0.5, 1.0, 0.9], device=self._device, dtype=torch.float64)
        return probabilities, top_k, top_p

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(self._device, dtype or self._dtype)

    def _table(self) -> RopeTable:
        """Made by the op itself, because a backend may need its own kind of table."""
        _, frequencies, dtype, interleaved = self.rope_table()
        return rope_table(
            torch.arange(self._sizes.tokens, device=self._device), frequencies, dtype, interleaved
        )

    def _heads(self) -> torch.Tensor:
        """Returns queries and keys, without the values that lie between rows."""
        sizes = self._sizes
        fused = self._random(sizes.tokens, sizes.queries + 2 * sizes.keys, sizes.head_dim)
        return fused[:, : sizes.queries + sizes.keys]

    def _slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read and written by each request: the first two start from zeros."""
        return torch.tensor([0, 0, 2], device=self._device), torch.tensor([1, 3, 4], device=self._device)

    def _sequences(self) -> Sequences:
        """Returns one token, then a chunk and a part of one, then less than a convolution remembers."""
        starts = [0, 1, 70, 72]
        return make_sequences(starts, torch.tensor(starts, dtype=torch.int32, device=self._device))

    def _conv(self, tokens: int) -> tuple[Any, ...]:
        width = self._sizes.linear.conv_width
        channels = self._sizes.channels or self._sizes.linear.conv_size
        rows = self._random(tokens, channels + 100)[:, :channels]
        return rows, self._random(5, width - 1, channels), self._random(channels, width), *self._slots()

    def _delta(self, tokens: int) -> tuple[Any, ...]:
        linear = self._sizes.linear
        heads = linear.num_value_heads
        a, b = self._random(tokens, 2 * heads).chunk(2, dim=1)
        a_log, dt_bias = self._random(2, heads, dtype=torch.float32)
        state = heads, linear.key_head_dim, linear.value_head_dim
        states = self._random(5, *state, dtype=torch.float32)
        return self._random(tokens, linear.conv_size), a, b, a_log, dt_bias, states, *self._slots()

    def _state_space(self, tokens: int) -> tuple[Any, ...]:
        linear = self._sizes.linear
        heads = linear.num_value_heads
        columns = self._random(tokens, linear.conv_size + heads)
        scalars = self._random(3, heads, dtype=torch.float32)
        state = heads, linear.key_head_dim, linear.value_head_dim
        states = self._random(5, *state, dtype=torch.float32)
        return columns[:, heads:], columns[:, :heads], *scalars, states, *self._slots()

    def _scan(self, tokens: int) -> tuple[Any, ...]:
        channels, state_dim = self._sizes.scan
        x, gate = self._random(tokens, 2 * channels).chunk(2, dim=1)
        a_log = self._random(channels, state_dim, dtype=torch.float32)
        b, c = (self._random(tokens, state_dim + extra)[:, extra:] for extra in (3, 5))
        states = self._random(5, channels, state_dim, 1, dtype=torch.float32)
        d = self._random(channels, dtype=torch.float32)
        return x, self._random(tokens, channels), b, c, gate, a_log, d, states, *self._slots()

    def _kimi(self, tokens: int) -> tuple[Any, ...]:
        linear = self._sizes.linear
        heads, key_dim = linear.num_value_heads, linear.key_head_dim
        columns = self._random(tokens, heads * (key_dim + 1))
        a, b = columns[:, : heads * key_dim], columns[:, heads * key_dim :]
        a_log, dt_bias = (self._random(size, dtype=torch.float32) for size in (heads, heads * key_dim))
        states = self._random(5, heads, key_dim, linear.value_head_dim, dtype=torch.float32)
        qkv = self._random(tokens, heads * (2 * key_dim + linear.value_head_dim))
        return qkv, a, b, a_log, dt_bias, self._sizes.decay_bound, states, *self._slots()


_MAKERS: dict[str, Callable[[_Maker], tuple[Any, ...]]] = {
    "rms_norm": _Maker.norm,
    "fused_add_rms_norm": _Maker.fused_add,
    "rope_table": _Maker.rope_table,
    "apply_rope": _Maker.apply_rope,
    "qk_norm_rope": _Maker.qk_norm_rope,
    "silu": _Maker.gate_up,
    "silu_and_mul": _Maker.gate_up,
    "gelu_and_mul": _Maker.gate_up,
    "gelu_tanh_and_mul": _Maker.gate_up,
    "clamped_swiglu_and_mul": _Maker.clamped_gate_up,
    "apply_gate": _Maker.attended_gates,
    "block_scores": _Maker.block_scores,
    "mean_block_scores": _Maker.mean_block_scores,
    "append_kv": _Maker.append_kv,
    "rotate_and_append": _Maker.rotate_and_append,
    "pool_index_keys": _Maker.pool_keys,
    "mean_index_keys": _Maker.mean_keys,
    "absorb_query": _Maker.absorb_query,
    "project_values": _Maker.project_values,
    "causal_conv_update": _Maker.conv_update,
    "causal_conv_extend": _Maker.conv_extend,
    "gated_delta_update": _Maker.delta_update,
    "gated_delta_extend": _Maker.delta_extend,
    "state_space_update": _Maker.state_space_update,
    "state_space_extend": _Maker.state_space_extend,
    "selective_scan_update": _Maker.scan_update,
    "selective_scan_extend": _Maker.scan_extend,
    "gated_rms_norm": _Maker.gated_norm,
    "gated_group_rms_norm": _Maker.gated_group_norm,
    "kimi_delta_update": _Maker.kimi_update,
    "kimi_delta_extend": _Maker.kimi_extend,
    "sigmoid_gated_rms_norm": _Maker.gated_norm,
    "collapse_streams": _Maker.collapse,
    "mix_streams": _Maker.mix,
    "norm_streams": _Maker.stream_norm,
    "mix_gated_streams": _Maker.gated_mix,
    "inject_update": _Maker.inject,
    "gate_values": _Maker.gate,
    "ngram_rows": _Maker.ngrams,
    "table_rows": _Maker.table_rows,
    "route": _Maker.route,
    "zero_experts": _Maker.zero_experts,
    "choose_by_kind": _Maker.choose_by_kind,
    "linear": _Maker.linear,
    "add_norm_linear": _Maker.add_norm_linear,
    "add_norm_route": _Maker.add_norm_route,
    "fp8_linear": _Maker.fp8_linear,
    "panel_linear": _Maker.panel_linear,
    "panel_rows": _Maker.panel_rows,
    "argmax_and_finite": _Maker.logits,
    "mask_logits": _Maker.masks,
    "truncate_probabilities": _Maker.truncate,
    "note_overflow": _Maker.overflow,
}


def example(name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes = SMALL) -> tuple[Any, ...]:
    """Returns fresh arguments of the op of that name, for activations of a dtype."""
    return _MAKERS[name](_Maker(device, dtype, sizes))
