"""Expert clients of several ranks: each rank asks for its part of the rows, and all fail or none does.

A server that is lost in the middle of a step may be seen by one rank and not by another, and a rank that
left the step would keep the others waiting in a collective. So a failure ends nothing: the rank goes on with
zeros, and at the end of the step all ranks agree on whether it has to be run again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_service.core.parallel import ParallelContext
from gpu_service.experts.client import (
    ExpertClient,
    ExpertClientStats,
    ExpertComputeFailed,
    ExpertUnavailable,
    Ticket,
)
from moebius.models.layers.ranks import even_shard

Failure = ExpertUnavailable | ExpertComputeFailed
Agree = Callable[[int], int]
"""The largest of all ranks' numbers; all ranks call it."""

# What ranks agree on: the worst that happened to any of them.
_NOTHING, _LOST, _REFUSED = 0, 1, 2


class RankExperts(ExpertClient):
    """One rank's face of a client.

    With `divides` the client knows nothing of ranks and is given this rank's rows only; else (the mailbox,
    whose request all ranks fill together) it divides them itself. Either way `collect` returns this
    rank's rows, zeros (or `partial`) elsewhere, and the layer's all-reduce makes them whole.
    """

    def __init__(self, inner: ExpertClient, parallel: ParallelContext, agree: Agree, divides: bool) -> None:
        """All ranks at once: a client that ranks share starts by agreeing."""
        self.geometry = inner.geometry
        self.is_device_driven = inner.is_device_driven
        self._inner = inner
        self._parallel = parallel
        self._agree = agree
        self._divides = divides
        # What went wrong first in the current step, of a client that raises.
        self._raised: Failure | None = None
        inner.agree_with_ranks(agree)

    def agree_with_ranks(self, agree: Agree) -> None:
        """Nothing: `__init__` has given the client the function already."""

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """Rows are divided here or by the client."""
        whole = Ticket(layer, hidden_states, topk_ids, topk_weights)
        if self._raised is not None:
            return whole
        own = self._own_rows(hidden_states.shape[0])
        try:
            return _RankTicket(
                layer,
                hidden_states,
                topk_ids,
                topk_weights,
                self._inner.submit(layer, hidden_states[own], topk_ids[own], topk_weights[own]),
            )
        except (ExpertUnavailable, ExpertComputeFailed) as error:
            self._raised = error
            return whole

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Only this rank's rows are added."""
        if partial is None:
            partial = torch.zeros_like(ticket.hidden_states, dtype=torch.float32)
        if self._raised is not None or not isinstance(ticket, _RankTicket):
            return partial
        try:
            self._inner.collect(ticket.inner, partial[self._own_rows(ticket.rows)])
        except (ExpertUnavailable, ExpertComputeFailed) as error:
            self._raised = error
        return partial

    def begin_step(self) -> None:
        self._inner.begin_step()

    def failure(self) -> Failure | None:
        """Returns what went wrong for any rank in the step that has just ended; every rank calls it once a
        step.
        """
        own = self._inner.failure() if self.is_device_driven else self._raised
        self._raised = None
        worst = self._agree(_severity(own))
        if worst == _NOTHING:
            return None
        if own is not None and _severity(own) == worst:
            return own
        text = "another rank could not reach its experts"
        return ExpertUnavailable(-1, text) if worst == _LOST else ExpertComputeFailed(text)

    def wait_ready(self, timeout_s: float) -> None:
        self._inner.wait_ready(timeout_s)

    def recover(self, timeout_s: float) -> None:
        """Returns, or raises, on all ranks alike."""
        error: ExpertUnavailable | None = None
        try:
            self._inner.recover(timeout_s)
        except ExpertUnavailable as raised:
            error = raised
        if self._agree(_severity(error)) != _NOTHING:
            raise error or ExpertUnavailable(-1, "another rank's experts did not return in time")

    def problem(self) -> str:
        return self._inner.problem()

    def damages(self) -> int:
        return self._inner.damages()

    def interrupt(self) -> None:
        """Interrupts this rank's waits. The step goes on when all ranks' waits have ended."""
        self._inner.interrupt()

    def newcomers(self) -> tuple[int, ...]:
        """Those that this rank's client has found."""
        return self._inner.newcomers()

    def confirm(self) -> None:
        self._inner.confirm()

    def reject(self, reason: str) -> None:
        self._inner.reject(reason)

    def agree_on(self, answer: bool) -> bool:
        return self._agree(int(answer)) != 0

    def stats(self) -> ExpertClientStats:
        """Returns what this rank's client counted."""
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()

    def _own_rows(self, rows: int) -> slice:
        if not self._divides:
            return slice(0, rows)
        return even_shard(rows, self._parallel.tp_rank, self._parallel.tp_size).slice


class _RankTicket(Ticket):
    """All rows of a layer, and the client's own ticket for this rank's."""

    __slots__ = ("inner",)

    def __init__(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        inner: Ticket,
    ) -> None:
        super().__init__(layer, hidden_states, topk_ids, topk_weights)
        self.inner = inner


def _severity(failure: Failure | None) -> int:
    if failure is None:
        return _NOTHING
    return _LOST if isinstance(failure, ExpertUnavailable) else _REFUSED
