"""Drafters propose tokens: on the host from known ones, or on the device from hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from gpu_service.core.request import Request
    from gpu_service.core.step import StepPlan
    from gpu_service.layers.context import ForwardContext


class HostDrafter(Protocol):
    """Called by the scheduler. Deterministic: every rank has its own, and all have to propose the same."""

    def propose(self, request: Request, count: int) -> list[int]:
        """At most `count` ids that may follow the known tokens; may be empty. Changes no length."""


class FirstPass(NamedTuple):
    """What a drafter's first layer makes of a step."""

    made: Tensor  # [T, H]
    token_ids: Tensor  # int64 [T], the likeliest token after the one after each row.


class DeviceDrafter(Protocol):
    """Called by the model runner in steps that say so, in stream order, waiting for nothing.

    What it needs of earlier tokens (KV of its own layers) it keeps at the same slots as the model: KV of
    drafts that turn out wrong is written over by the step that computes those positions next. A step may be
    run again unchanged, and one of the prefill lane may be computed next to one of the main lane, for other
    requests. It may raise ExpertUnavailable: the step's tokens stand, and it has no drafts.
    """

    def make_buffer(self, num_rows: int) -> Tensor:
        """Returns memory `[num_rows, H]` that captured graphs leave the hidden states of decode steps in."""

    def inputs(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        """Returns what `propose` reads of a step, `[T, H]`; captured graphs hold it.

        `hidden_states` `[T, H]`: after the final norm; `context`: with which the model made them.
        """

    @property
    def captures(self) -> bool:
        """Whether `first_pass` may be recorded in a graph, and all else works with what such a graph made."""

    def first_pass(self, context: ForwardContext, hidden_states: Tensor, next_ids: Tensor) -> FirstPass:
        """Returns the first pass over a step's rows, arguments as those of `propose`."""

    def propose(
        self,
        context: ForwardContext,
        plan: StepPlan,
        hidden_states: Tensor,
        next_ids: Tensor,
        last_rows: Tensor,
        first: FirstPass | None = None,
    ) -> Tensor | None:
        """Drafts int64 `[Q, k]` for the Q requests that sample, in batch order; None: there are none.

        `context`: of the step, whose attention is planned for `plan` (on the device); `hidden_states`
        `[T, H]`: what `inputs` returned; `next_ids` int64 `[T]`: the token after each row, by now in the
        token pool: the prompt's, or what the row sampled; `last_rows` int64 `[Q]`: of each request the row
        whose next token is its newest, accepted drafts counted, those after it are of no use.
        `first`: the first pass, where a graph has run it; the attention is not planned for `plan` then.
        k is at most `plan.num_drafts`; 0: no drafts will be read, only the drafter's own KV is to be kept.
        """
