"""Which processes serve the experts: whether they are ready, which are new, and that these compute as before.

Two things can have changed when a server returns: what it is meant to compute (its identity, compared before
anything else) and what it really computes (compared with what its predecessor computed, by `CheckedExperts`).
A process that was found right stays confirmed for its life.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

import structlog
import torch

from gpu_service.experts.client import (
    ExpertClient,
    ExpertClientStats,
    ExpertComputeFailed,
    ExpertUnavailable,
    Ticket,
)
from moebius import _kernels
from moebius.errors import WrongIdentity
from moebius.mailbox import Mailbox, ServerLost, ShutDown
from moebius.models.identity import CHECKPOINT, identity_part


class Newcomers:
    """Processes by server, each known by a number (generation, instance) that no successor has."""

    def __init__(self, num_servers: int, fingerprint: str) -> None:
        """`fingerprint` of the engine's own checkpoint; empty: not compared."""
        self._fingerprint = fingerprint
        self._present = [0] * num_servers
        self._confirmed = [0] * num_servers

    def problem_of(self, identity: str) -> str:
        """What of a server's identity does not fit this engine, in words; empty: nothing, or it has none."""
        theirs = identity_part(identity, CHECKPOINT)
        if not theirs or not self._fingerprint or theirs == self._fingerprint:
            return ""
        return (
            f"{CHECKPOINT} is {theirs}, this engine has {self._fingerprint}: other files, or files that have "
            "changed since the servers or the engine started"
        )

    def arrived(self, present: Sequence[int]) -> None:
        """`present`: the number of each server's process that is ready now, in server order."""
        self._present = list(present)

    def unconfirmed(self) -> tuple[int, ...]:
        """Servers that have been started since they were last confirmed."""
        pairs = enumerate(zip(self._present, self._confirmed, strict=True))
        return tuple(server for server, (now, then) in pairs if now != then)

    def confirm(self) -> None:
        """Takes all processes that are present as checked."""
        self._confirmed = list(self._present)

    def process(self, server: int) -> int:
        """Returns the number (generation or instance) of a server's present process."""
        return self._present[server]


def difference(expected: str, found: str) -> str:
    """Returns what of two identities differs, in words; empty: nothing."""
    return _kernels.mailbox_identity_difference(expected, found)


# How soon a wait notices that it was interrupted.
_SLICE_S = 0.1


class MailboxServers:
    """`problem` and `interrupt` may be called by any thread."""

    def __init__(self, mailbox: Mailbox, deadline_ms: int, fingerprint: str = "") -> None:
        """`deadline_ms`: the longest wait for one answer; a server that is silent for longer is lost.

        `fingerprint`: see `Newcomers`.
        """
        self.newcomers = Newcomers(mailbox.geometry.num_servers, fingerprint)
        self._mailbox = mailbox
        self._deadline_ms = deadline_ms
        self._interrupted = threading.Event()

    def wait_ready(self, timeout_s: float) -> list[int]:
        """Returns the generations of the servers, all of them ready; the mailbox takes answers of no others
        then.

        Raises ExpertUnavailable naming the first that is not ready and why a replacement was refused, or
        WrongIdentity when the servers serve another checkpoint than this engine.
        """
        generations = self._wait(timeout_s)
        problem = self.newcomers.problem_of(self._mailbox.identity)
        if problem:
            name = self._mailbox.name
            raise WrongIdentity(f"the expert servers of mailbox '{name}' do not fit this engine: {problem}")
        self._mailbox.accept_generations(generations)
        self.newcomers.arrived(generations)
        return generations

    def _wait(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._interrupted.is_set():
                raise ExpertUnavailable(-1, "the wait for expert servers was given up: the engine stops")
            remaining = deadline - time.monotonic()
            try:
                return self._mailbox.wait_servers_ready(min(max(remaining, 0.0), _SLICE_S))
            except ServerLost as error:
                if remaining <= _SLICE_S:
                    raise ExpertUnavailable(error.server_index, error.reason) from error
            except ShutDown as error:
                raise ExpertUnavailable(error.server_index, str(error)) from error

    def reject_newcomers(self, reason: str) -> None:
        """Tells the unconfirmed servers to leave."""
        for server in self.newcomers.unconfirmed():
            self._mailbox.reject(server, self.newcomers.process(server), reason)

    def interrupt(self) -> None:
        self._interrupted.set()

    def damages(self) -> int:
        return self._mailbox.kernel.damages()

    def problem(self) -> str:
        for index in range(self._mailbox.geometry.num_servers):
            server = self._mailbox.server_state(index)
            if server.state != "ready":
                why = f": {server.refusal}" if server.refusal else ""
                return f"expert server {index} is {server.state}{why}"
            if server.refusal:
                return f"expert server {index}: {server.refusal}"
            if server.heartbeat_age_s * 1000 > self._deadline_ms:
                return f"expert server {index} has been silent for {server.heartbeat_age_s:.0f} s"
        return ""


class Servers(Protocol):
    """The servers of one client, over a mailbox or gRPC."""

    newcomers: Newcomers

    def problem(self) -> str:
        """Returns as `ExpertClient.problem`."""

    def interrupt(self) -> None:
        """Ends waits, as `ExpertClient.interrupt`."""

    def reject_newcomers(self, reason: str) -> None:
        """Sends the unconfirmed ones away."""


ServersT = TypeVar("ServersT", bound=Servers)


class ServedClient(ExpertClient, Generic[ServersT]):
    """What clients have in common, whatever drives them: the servers that they ask."""

    def __init__(self, servers: ServersT) -> None:
        self._servers = servers

    def problem(self) -> str:
        return self._servers.problem()

    def interrupt(self) -> None:
        self._servers.interrupt()

    def newcomers(self) -> tuple[int, ...]:
        return self._servers.newcomers.unconfirmed()

    def confirm(self) -> None:
        self._servers.newcomers.confirm()

    def reject(self, reason: str) -> None:
        self._servers.reject_newcomers(reason)


class MailboxClient(ServedClient[MailboxServers]):
    """A client of a mailbox, which a host or a device drives."""

    def damages(self) -> int:
        return self._servers.damages()


_log = structlog.get_logger(__name__)
# Between two checks of servers that were lost during the first one.
_CHECK_AGAIN_S = 0.05
Check = Callable[[], str]
"""Asks all servers for what they computed before: the difference in words, empty when there is none.

Raises ExpertUnavailable when one is lost meanwhile."""


class CheckedExperts(ExpertClient):
    """A client whose `recover` also checks the servers that have restarted.

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
        """The error names what the last server was sent away for."""
        deadline = time.monotonic() + timeout_s
        refused = ""
        while True:
            try:
                self._inner.recover(max(0.0, deadline - time.monotonic()))
            except ExpertUnavailable as error:
                raise _explained(error, refused) from error.__cause__
            lost: ExpertUnavailable | None = None
            found = ""
            try:
                found = self._problem()
            except ExpertUnavailable as error:
                lost = error
                _log.warning("an expert server was lost again before it was checked", error=str(error))
            if lost is None and not found:
                return
            if found:
                refused = found
                _log.error("an expert server that returned computes wrongly and is sent away", why=found)
                self._inner.reject(found)
            # Ranks read different clocks, and go on or give up together.
            if self._inner.agree_on(time.monotonic() >= deadline):
                raise _explained(lost or ExpertUnavailable(-1, "the time to recover is over"), refused)
            if lost is not None:
                time.sleep(_CHECK_AGAIN_S)

    def _problem(self) -> str:
        """Returns what is wrong with the newcomers; every rank comes to the same verdict."""
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
        self._inner.agree_with_ranks(agree)

    def agree_on(self, answer: bool) -> bool:
        return self._inner.agree_on(answer)

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        return self._inner.submit(layer, hidden_states, topk_ids, topk_weights)

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        return self._inner.collect(ticket, partial)

    def driven_by_host(self, rows: int) -> AbstractContextManager[_kernels.RoutedExperts | None]:
        return self._inner.driven_by_host(rows)

    def begin_step(self) -> None:
        self._inner.begin_step()

    def failure(self) -> ExpertUnavailable | ExpertComputeFailed | None:
        return self._inner.failure()

    def wait_ready(self, timeout_s: float) -> None:
        self._inner.wait_ready(timeout_s)

    def problem(self) -> str:
        return self._inner.problem()

    def damages(self) -> int:
        return self._inner.damages()

    def interrupt(self) -> None:
        self._inner.interrupt()

    def stats(self) -> ExpertClientStats:
        return self._inner.stats()

    def busy_seconds(self) -> float:
        return self._inner.busy_seconds()

    def close(self) -> None:
        self._inner.close()


def _explained(error: ExpertUnavailable, refused: str) -> ExpertUnavailable:
    """Returns the same error; `refused`: what the last server that had returned was sent away for,
    or empty.
    """
    if not refused:
        return error
    text = f"{error.reason} (a server that had returned was refused: {refused})"
    return type(error)(error.server_index, text)
