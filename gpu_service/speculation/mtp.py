"""Drafts from layers after the model's last: of multi-token prediction, or an EAGLE-3 head.

In every step, once its tokens are sampled, the first head runs over all rows: prompts' too, since it attends
to what it made of earlier tokens. A row at position p has the model's hidden state (for an EAGLE-3 head what
the step itself made of several layers' streams) and the token at p + 1, and is kept in the slot of p, in the
head's own layer of the model's cache; what it predicts is the token at p + 2, which of each request's last
row is the first draft. Further drafts come from the heads after it, over the same rows; a single head goes on
with what it made itself, a position a pass.

None of this decides a token: a wrong draft is refused when it is verified. That leaves three places where
what a head attends to is not exactly its own, at the cost of drafts alone:

- The entry of the last position of a page that another request's prompt shares was made with the token that
  followed there.
- Passes of a single head after the first write where the request's next step computes, which writes it again;
  where no page is there yet and none is free, they share the dummy page.
- A second head's entry of a request's last row was made with a draft, accepted or rejected.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Self

import torch

from gpu_service.attention.registry import Attention
from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.step import StepPlan, TokenPool
from gpu_service.layers.context import ForwardContext
from gpu_service.models.common import CausalLM
from gpu_service.speculation.drafter import FirstPass
from gpu_service.speculation.rows import rows_ahead


class MtpDrafter:
    """A `DeviceDrafter`; waits for nothing."""

    def __init__(
        self,
        model: CausalLM,
        token_pool: TokenPool,
        parallel: ParallelContext = SOLO,
        attention: Attention | None = None,
    ) -> None:
        """`model` serves its heads; `token_pool`: of the runner that calls; `attention`: over the cache
        beside the model's, where a head's keys and values are there.
        """
        self._model, self._pool, self._parallel = model, token_pool, parallel
        self._attention = attention
        self._num_heads = model.config.num_draft_layers

    def with_attention(self, attention: Attention) -> Self:
        """Returns the same drafter for steps on another stream, which are planned apart."""
        found = copy.copy(self)
        found._attention = attention
        return found

    def make_buffer(self, num_rows: int) -> torch.Tensor:
        """Returns zeros `[num_rows, H]`."""
        shape = num_rows, self._model.config.hidden_size
        return torch.zeros(shape, dtype=self._model.dtype, device=self._pool.tokens.device)

    def inputs(self, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns what the first head reads, `[T, H]`."""
        return self._model.draft_inputs(hidden_states, context)

    @property
    def captures(self) -> bool:
        """Returns whether there is one head, planned as the model is: others' passes are planned with the
        first.
        """
        return self._num_heads == 1 and self._attention is None

    def first_pass(
        self, context: ForwardContext, hidden_states: torch.Tensor, next_ids: torch.Tensor
    ) -> FirstPass:
        """Runs the first head over all rows, and the head of the vocabulary as well."""
        # Statistics are of the model's own layers.
        made = self._model.predict_further(0, hidden_states, next_ids, replace(context, recorder=None))
        return FirstPass(made, self._model.best_drafts(0, made))

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
        context = replace(context, recorder=None)
        if self._attention is not None:
            context = beside(context, self._attention)
            self._attention.plan(context.inputs)
        wants_drafts = plan.num_drafts > 0 and last_rows.numel() > 0
        if first is None:
            made = self._model.predict_further(0, hidden_states, next_ids, context)
            # Of a prompt's rows the vocabulary's head reads the last ones alone.
            best = self._best(made, last_rows) if wants_drafts or self._num_heads > 1 else last_rows
        else:
            made, best = first.made, first.token_ids[last_rows]
        if self._num_heads > 1:
            drafts = self._chain(context, plan, made, last_rows, best)
        elif wants_drafts:
            drafts = self._recycle(context, plan, made, last_rows, best)
        if not wants_drafts:
            return None
        found = torch.stack(drafts[: plan.num_drafts], dim=1)
        return self._parallel.world_group.broadcast(found, self._parallel.sampling_rank)

    def _best(self, hidden_states: torch.Tensor, rows: torch.Tensor, head: int = 0) -> torch.Tensor:
        """Returns the ids int64 `[Q]` that the head finds most likely after some rows."""
        return self._model.best_drafts(head, hidden_states[rows])

    def _chain(
        self,
        context: ForwardContext,
        plan: StepPlan,
        hidden_states: torch.Tensor,
        last_rows: torch.Tensor,
        best: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Returns a draft of each head, which all see all rows; `hidden_states` and `best`: the first one's,
        `[T, H]` and int64 `[Q]`.
        """
        slots, end = plan.token_slots, self._pool.tokens.shape[1] - 1
        drafts = [best]
        for head in range(1, self._num_heads):
            ids = self._pool.gather(slots, (plan.positions + 1 + head).clamp(max=end))
            for depth, known in reversed(list(enumerate(reversed(drafts)))):
                # The row `depth` before a request's last one looks beyond what is known, where it is one of
                # the request's; the last one, of which there is always one, is written last.
                early = (last_rows - depth).clamp(min=0)
                is_own = slots[early] == slots[last_rows]
                ids = ids.scatter(0, early, torch.where(is_own, known, ids[early]))
            hidden_states = self._model.predict_further(head, hidden_states, ids, context)
            drafts.append(self._best(hidden_states, last_rows, head))
        return drafts

    def _recycle(
        self,
        context: ForwardContext,
        plan: StepPlan,
        hidden_states: torch.Tensor,
        last_rows: torch.Tensor,
        best: torch.Tensor,
    ) -> list[torch.Tensor]:
        """`plan.num_drafts` drafts of a single head, each from what it made of the one before.

        `hidden_states` `[T, H]` and `best` int64 `[Q]`: of the first pass.
        A pass has a row for each entry of the plan, at the position after it, because only the device knows
        which rows of verified drafts are requests' last; all others write to the dummy page and ask for no
        experts.
        """
        drafts = [best]
        if plan.num_drafts == 1:
            return drafts
        ends = plan.query_start_loc_tensor[1:].long()
        entries = torch.searchsorted(ends, last_rows, right=True)
        rows = ends - 1
        is_last = torch.zeros_like(rows, dtype=torch.bool).scatter(0, entries, True)
        hidden_states = hidden_states[rows]
        for ahead in range(1, plan.num_drafts):
            inputs = rows_ahead(plan, context.kv_cache.page_size, ahead, rows, is_last)
            ids = torch.zeros_like(rows).scatter(0, entries, drafts[-1])
            context.attention.plan(inputs)
            # What a step streams of a layer is there once.
            step = replace(context, inputs=inputs, streamed=None)
            hidden_states = self._model.predict_further(0, hidden_states, ids, step)
            drafts.append(self._best(hidden_states, entries))
        return drafts


def beside(context: ForwardContext, attention: Attention) -> ForwardContext:
    """Returns what a head with a cache of its own is given, beside the model's; `attention` is over it."""
    cache = context.kv_cache.beside
    assert cache is not None, "asked only of models with such a cache"
    return replace(context, kv_cache=cache, attention=attention)
