"""The two orders in which an engine can do the same steps.

host    | receive, schedule N+1, launch N+1 | wait N, commit N, tell | receive, schedule N+2 ...
device  |---------- step N ----------|---------- step N+1 (ids from the token pool) ----------|
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_service.engine.engine import Engine, Step


def overlap_loop(engine: Engine) -> None:
    """Step N+1 is scheduled and launched before the tokens of step N are known to the host."""
    previous: Step | None = None
    while engine.receive(wait=previous is None):
        current = engine.launch_next()
        if previous is not None:
            engine.commit(previous)
        previous = current
    if previous is not None:
        engine.commit(previous)


def synchronous_loop(engine: Engine) -> None:
    """The twin without overlap: what the overlap loop must be equal to, and simpler to debug."""
    while engine.receive(wait=True):
        current = engine.launch_next()
        if current is not None:
            engine.commit(current)
