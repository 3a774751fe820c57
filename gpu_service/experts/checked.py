"""Nothing is computed by a server that has returned until it has shown that it computes as before."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
import torch

from gpu_service.experts.client import (
    ExpertClient,
    ExpertClientStats,
    ExpertComputeFailed,
    ExpertUnavailable,
    Ticket,
)

_log = structlog.get_logger(__name__)
Check = Callable[[], str]
"""Asks all servers for what they computed before: the difference in words, empty when there is none.

Raises ExpertUnavailable when one is lost meanwhile."""


class CheckedExperts(ExpertClient):
    """A client whose `recover` also checks the servers that were started anew.

    One that fails is sent away, and its successor is waited for until the time is up. Everything else is the
    client's own.
    """

    def __init__(self, inner: ExpertClient) -> None:
        self.geometry = inner.geometry
        self.is_device_driven = inner.is_device_driven
        self._inner = inner
        self._check: Check | None = None

    def check_with(self, check: Check | None) -> None:
        """Servers that are present have passed the self-test; later ones have to pass `check`. None: none."""
        self._check = check
        self._inner.confirm()

    def recover(self, timeout_s: float) -> None:
        """See `ExpertClient.recover`. The error names what the last server was sent away for."""
        deadline = time.monotonic() + timeout_s
        problem = ""
        while True:
            try:
                self._inner.recover(max(0.0, deadline - time.monotonic()))
                found = self._problem()
            except ExpertUnavailable as error:
                if not problem:
                    raise
                text = f"{error.reason} (a server that had returned was refused: {problem})"
                raise ExpertUnavailable(error.server_index, text) from error
            if not found:
                return
            problem = found
            _log.error("an expert server that returned computes something else and is sent away", why=found)
            self._inner.reject(found)

    def _problem(self) -> str:
        """What is wrong with the newcomers; every rank comes to the same verdict."""
        newcomers = self._inner.newcomers()
        if not self._inner.agree_on(bool(newcomers)):
            return ""
        found = "" if self._check is None else self._check()
        if self._inner.agree_on(bool(found)):
            return found or "another rank found it to compute something else"
        self._inner.confirm()
        if newcomers:
            _log.info("expert servers that returned compute as before", servers=list(newcomers))
        return ""

    def agree_with_ranks(self, agree: Callable[[int], int]) -> None:
        """See `ExpertClient.agree_with_ranks`."""
        self._inner.agree_with_ranks(agree)

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """See `ExpertClient.submit`."""
        return self._inner.submit(layer, hidden_states, topk_ids, topk_weights)

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """See `ExpertClient.collect`."""
        return self._inner.collect(ticket, partial)

    def begin_step(self) -> None:
        """See `ExpertClient.begin_step`."""
        self._inner.begin_step()

    def failure(self) -> ExpertUnavailable | ExpertComputeFailed | None:
        """See `ExpertClient.failure`."""
        return self._inner.failure()

    def wait_ready(self, timeout_s: float) -> None:
        """See `ExpertClient.wait_ready`."""
        self._inner.wait_ready(timeout_s)

    def problem(self) -> str:
        """See `ExpertClient.problem`."""
        return self._inner.problem()

    def interrupt(self) -> None:
        """See `ExpertClient.interrupt`."""
        self._inner.interrupt()

    def stats(self) -> ExpertClientStats:
        """See `ExpertClient.stats`."""
        return self._inner.stats()

    def close(self) -> None:
        """See `ExpertClient.close`."""
        self._inner.close()
