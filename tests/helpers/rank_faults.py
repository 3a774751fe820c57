"""Groups of rank processes that something happens to."""

from __future__ import annotations

import multiprocessing.connection
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_service.experts.client import ExpertUnavailable, Ticket
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.main import run_follower
from gpu_service.models.common import CausalLM
from moebius.config import MoebiusConfig, TelemetryConfig
from moebius.network.tls import configure_tls
from moebius.process.operations import ProcessState
from moebius.telemetry import configure_logging
from tests.helpers.engine_outputs import WAIT_S
from tests.helpers.rank_group import CONTEXT, Script, rank_config, with_rank

PROMPT = list(range(5, 17))


@dataclass
class StartedGroup:
    """Rank processes that are decoding; `results` brings the tokens of rank 0, if it gets so far."""

    processes: list[Any]
    logs: Path
    results: multiprocessing.connection.Connection

    def pid(self, rank: int) -> int:
        """Returns the process id of a rank's process."""
        return int(self.processes[rank].pid)

    def kill(self, rank: int, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid(rank), number)

    def exit_codes(self, but: int | None = None) -> list[int | None]:
        """Returns how all ended, or all but one, once those that still run had time to."""
        waited = [process for rank, process in enumerate(self.processes) if rank != but]
        for process in waited:
            process.join(WAIT_S / 4)
        return [process.exitcode for process in waited]

    def log(self, rank: int) -> str:
        """Returns what a rank wrote to its standard error."""
        return (self.logs / f"{rank}.log").read_text()

    def tokens(self) -> list[int]:
        """Returns what rank 0's request gave."""
        assert self.results.poll(WAIT_S), "no result came"
        tokens: list[int] = self.results.recv()
        return tokens


def _log_to(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, sys.stderr.fileno())
    configure_logging(TelemetryConfig(), "gpu")


def _break_model(after: int, hangs: bool) -> None:
    """From the `after`-th step on this process's model fails, or never ends."""
    forward, steps = CausalLM.forward, iter(range(10**6))

    def broken(self: CausalLM, context: Any) -> torch.Tensor:
        if next(steps) >= after:
            while hangs:
                time.sleep(1.0)
            raise ValueError("broken weights")
        return forward(self, context)

    CausalLM.forward = broken  # type: ignore[method-assign]


def _lose_experts(call: int) -> None:
    """The `call`-th layer this process collects is lost once; the servers are back at once."""
    collect, calls = LocalExpertClient.collect, iter(range(10**6))

    def flaky(self: LocalExpertClient, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        if next(calls) == call:
            raise ExpertUnavailable(0, "killed by the test")
        return collect(self, ticket, partial)

    LocalExpertClient.collect = flaky  # type: ignore[method-assign]


def _run(
    config: MoebiusConfig,
    logs: Path,
    faults: tuple[int | None, int | None, tuple[int, ...], int | None],
    results: multiprocessing.connection.Connection,
) -> None:
    failing_rank, stuck_rank, flaky, max_tokens = faults
    configure_tls(config.security)
    rank = config.parallel.rank
    _log_to(logs / f"{rank}.log")
    if rank in (failing_rank, stuck_rank):
        _break_model(after=6 if rank == failing_rank else 12, hangs=rank == stuck_rank)
    if flaky:
        _lose_experts(flaky[rank])
    if rank:
        sys.exit(run_follower(config, ProcessState()))
    script = Script(config)
    request = script.submit("r", PROMPT, max_tokens=max_tokens or 400, ignore_eos=True)
    script.wait_tokens([request], 3)
    results.send("decoding")
    results.send(script.outcomes([request])[0].token_ids)
    script.close()


@contextmanager
def started_group(
    model: Path,
    directory: Path,
    *,
    tp: int,
    pp: int,
    timeout_s: float,
    failing_rank: int | None = None,
    stuck_rank: int | None = None,
    flaky: tuple[int, ...] | None = None,
    **settings: Any,
) -> Iterator[StartedGroup]:
    """A group in the middle of a request; a long one, unless `flaky` says which layer each rank loses."""
    config = rank_config(model, tp, pp, **({"num_pages": 128} | settings))
    # A layer lost before requests are served would end the start, not a step.
    experts = config.experts.model_copy(update={"self_test_layers": 0} if flaky else {})
    parallel = config.parallel.model_copy(update={"rank_timeout_s": timeout_s})
    config = config.model_copy(update={"parallel": parallel, "experts": experts})
    faults = (failing_rank, stuck_rank, flaky or (), None if flaky is None else 24)
    receiving, sending = CONTEXT.Pipe(duplex=False)
    processes = [
        CONTEXT.Process(target=_run, args=(with_rank(config, rank), directory, faults, sending))
        for rank in range(tp * pp)
    ]
    for process in processes:
        process.start()
    sending.close()
    try:
        if failing_rank is None:
            assert receiving.poll(WAIT_S), "the group did not start"
            assert receiving.recv() == "decoding"
        yield StartedGroup(processes, directory, receiving)
    finally:
        for process in processes:
            process.kill()
            process.join()
