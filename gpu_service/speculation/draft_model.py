"""Drafts from a smaller model with the same tokenizer, whole on every rank's device.

It keeps keys and values (or latents) of the tokens that the large model keeps, in pages of the same numbers
(`AttendedPages.beside`): what becomes of a request's pages, prefixes that others share, preemption, lower
tiers, becomes of the small model's, too. In every step, once its tokens are sampled, it computes the step's
rows itself, and in decode steps the newest token of each request in the same pass: the likeliest token after
it is the first draft. Each further draft is a pass of one row per request.

Rows of drafts that the step refused are computed in vain: where they would write, the newest token does. A
pass may write beyond the last page that a request has; `Speculation` asks for that page before, and where
there is none, requests share the dummy page, at the cost of drafts alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gpu_service.attention.registry import Attention
from gpu_service.cache.kv_cache import PagedCache
from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.step import ForwardInputs, StepPlan, TokenPool
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.layers.context import ForwardContext
from gpu_service.models.common import CausalLM
from gpu_service.speculation.drafter import FirstPass
from gpu_service.speculation.rows import rows_ahead


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A loaded model; filled by `assembly.draft_model.load_draft_model`."""

    model: CausalLM
    resident: ResidentExperts | None  # All its routed experts; None: it is dense.

    def text(self, inputs: ForwardInputs, ids: torch.Tensor) -> ForwardInputs:
        """Returns what it reads of a step in the place of `inputs`, with its tokens int64 `[T]`: those beyond
        the vocabulary are its last one, and an image's are tokens as any other.
        """
        return replace(
            inputs,
            input_ids=ids.clamp(max=self.model.config.vocab_size - 1),
            image_features=None,
            mrope_positions=None,
            visible_ends=None,
            valid_rows=None if self.resident is None else inputs.valid_rows,
        )

    def forward(
        self,
        text: ForwardInputs,
        cache: PagedCache,
        attention: Attention,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Returns hidden states `[T, H]` of what `text` returned, for which `attention` over `cache` is
        planned.
        """
        own = ForwardContext(
            text, cache, attention, None, resident=self.resident, between_layers=between_layers
        )
        return self.model.forward(own)


class ModelDrafter:
    """A `DeviceDrafter`; waits for nothing."""

    captures = False

    def __init__(
        self,
        drafting: DraftModel,
        cache: PagedCache,
        attention: Attention,
        token_pool: TokenPool,
        vocab_size: int,
        parallel: ParallelContext = SOLO,
    ) -> None:
        """`cache`: that of the large model's `beside`, over which `attention` is; `token_pool`: of the runner
        that calls; `vocab_size`: the large model's, of which all drafts are.
        """
        self._drafting, self._cache, self._attention = drafting, cache, attention
        self._pool, self._vocab_size, self._parallel = token_pool, vocab_size, parallel

    def with_attention(self, attention: Attention) -> ModelDrafter:
        """Returns the same drafter for steps on another stream, which are planned apart."""
        shared = self._pool, self._vocab_size, self._parallel
        return ModelDrafter(self._drafting, self._cache, attention, *shared)

    def make_buffer(self, num_rows: int) -> torch.Tensor:
        """Returns nothing of each row, `[num_rows, 0]`: hidden states are not read."""
        return torch.empty((num_rows, 0), dtype=self._drafting.model.dtype, device=self._pool.tokens.device)

    def inputs(self, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns nothing of each row, `[T, 0]`."""
        return hidden_states[:, :0]

    def first_pass(
        self, context: ForwardContext, hidden_states: torch.Tensor, next_ids: torch.Tensor
    ) -> FirstPass:
        """Raises AssertionError: no graph has it, since it is planned apart from the step's."""
        raise AssertionError("a draft model's passes are not captured")

    def propose(
        self,
        context: ForwardContext,
        plan: StepPlan,
        hidden_states: torch.Tensor,
        next_ids: torch.Tensor,
        last_rows: torch.Tensor,
        first: FirstPass | None = None,
    ) -> torch.Tensor | None:
        """Proposes as the protocol says; drafts are the same on all ranks."""
        if plan.num_drafts == 0 or last_rows.numel() == 0:
            self._forward(plan, plan.input_ids, context)
            return None
        ends = plan.query_start_loc_tensor[1:].long()
        entries = torch.searchsorted(ends, last_rows, right=True)
        rows = ends - 1
        is_last = torch.zeros_like(rows, dtype=torch.bool).scatter(0, entries, True)
        drafts = list[torch.Tensor]()
        for ahead in range(1, 1 + plan.num_drafts):
            newest = drafts[-1] if drafts else next_ids[last_rows]
            ids = torch.zeros_like(rows).scatter(0, entries, newest)
            inputs = rows_ahead(plan, self._cache.page_size, ahead, rows, is_last)
            if ahead > 1:
                made = self._forward(inputs, ids, context)[entries]
            elif plan.is_uniform_decode:
                both = _with_rows_ahead(plan, inputs, last_rows)
                made = self._forward(both, torch.cat((plan.input_ids, ids)), context)[ends.numel() + entries]
            else:
                self._forward(plan, plan.input_ids, context)
                made = self._forward(inputs, ids, context)[entries]
            logits = self._drafting.model.compute_logits(made)
            drafts.append(logits[:, : self._vocab_size].argmax(-1))
        found = torch.stack(drafts, dim=1)
        return self._parallel.world_group.broadcast(found, self._parallel.sampling_rank)

    def _forward(self, inputs: ForwardInputs, ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        text = self._drafting.text(inputs, ids)
        self._attention.plan(text)
        return self._drafting.forward(text, self._cache, self._attention, context.between_layers)


def _with_rows_ahead(plan: StepPlan, ahead: ForwardInputs, last_rows: torch.Tensor) -> ForwardInputs:
    """Returns the rows of a decode step, and after them those `ahead`, as one step.

    Rows after the last one of their request, `last_rows` int64 `[Q]`, write to the dummy page and ask for no
    experts.
    """
    slots, count = plan.token_slots, plan.token_slots.numel()
    rows = torch.arange(count, device=slots.device)
    # Of a request the rows up to its last one; where none is sampled from, all.
    is_same = slots[:, None] == slots[last_rows][None]
    is_right = ~(is_same & (rows[:, None] > last_rows[None])).any(1)
    assert ahead.valid_rows is not None
    table = torch.nn.functional.pad(
        plan.block_table, (0, ahead.block_table.shape[1] - plan.block_table.shape[1])
    )
    total = 2 * count
    return ForwardInputs(
        input_ids=ahead.input_ids,
        positions=torch.cat((plan.positions, ahead.positions)),
        slot_mapping=torch.cat((plan.slot_mapping.masked_fill(~is_right, 0), ahead.slot_mapping)),
        block_table=torch.cat((table, ahead.block_table)),
        query_start_loc=list(range(total + 1)),
        seq_lens=[*plan.seq_lens, *ahead.seq_lens],
        logits_indices=ahead.logits_indices,
        query_start_loc_tensor=torch.arange(total + 1, dtype=torch.int32, device=slots.device),
        seq_lens_tensor=torch.cat((plan.seq_lens_tensor, ahead.seq_lens_tensor)),
        valid_rows=torch.cat((is_right, ahead.valid_rows)),
    )
