"""Serves the gateway's metrics and probes on a port of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from moebius.config import MoebiusConfig
from moebius.process.operations import Answers, ProcessState, start_operations

T = TypeVar("T")
# An event loop that is silent for longer hangs: its bound for any single piece of work is 20 ms.
_ANSWER_S = 5.0


@contextlib.contextmanager
def gateway_operations(
    config: MoebiusConfig, metrics: Callable[[], Awaitable[bytes]], not_ready: Callable[[], Awaitable[str]]
) -> Iterator[None]:
    """Answers while the context is open, from threads that ask the running event loop; port 0: not at all.

    `not_ready` returns why a request sent now would not be answered, empty: it would. Raises UserError when
    the port cannot be bound.
    """
    loop = asyncio.get_running_loop()

    async def asked(question: Callable[[], Awaitable[T]]) -> T:
        return await question()

    def ask(question: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(question, loop).result(_ANSWER_S)

    def state() -> ProcessState:
        try:
            return ProcessState(ask(asked(not_ready)))
        except concurrent.futures.TimeoutError:
            silent = f"the event loop has not answered for {_ANSWER_S:g} s"
            return ProcessState(silent, silent)

    port, host = config.gateway.gateway_metrics_port, config.telemetry.metrics_host
    answers = Answers(lambda: ask(asked(metrics)), state)
    server = start_operations(port, host, answers, config.gateway.allowed_hosts)
    try:
        yield
    finally:
        if server is not None:
            server.close()
