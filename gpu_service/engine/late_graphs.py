"""Graphs of steps with prompts that are captured once the engine serves: until then such steps run eagerly.

An engine that wakes is ready seconds earlier, and captures a graph whenever it has nothing to do, the largest
first, so that a request waits for one graph at most. Where it always has something to do, the steps pause
for one every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from gpu_service.engine.step_runner import StepRunner

# Operations of the engine; the first one is called when the engine is ready, the other one by its own loop.
BEGIN_GRAPHS, CAPTURE_GRAPH = "begin graphs of prompts", "capture a graph of prompts"
# Between two graphs of an engine that is never idle; a graph takes a quarter of a second.
_PAUSE_S = 5.0


class LateGraphs:
    """What one engine captures late. All but the constructor is called by the engine's thread."""

    def __init__(
        self,
        steps: StepRunner,
        settle: Callable[[], None],
        counted: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settle`: `Engine.settle`; `counted`: within it is counted what a capture takes of the device."""
        self._steps, self._settle, self._counted, self._clock = steps, settle, counted, clock
        self._has_begun, self._next_at = False, 0.0

    @property
    def operations(self) -> Mapping[str, Callable[[str], None]]:
        """What the engine runs, by name."""
        return {BEGIN_GRAPHS: lambda _: self._begin(), CAPTURE_GRAPH: lambda _: self._capture()}

    def due(self, is_idle: bool) -> str:
        """Returns the operation that is to be run now; empty: none."""
        if not self._has_begun or not self._steps.may_capture:
            return ""
        return CAPTURE_GRAPH if is_idle or self._clock() >= self._next_at else ""

    def _begin(self) -> None:
        self._has_begun, self._next_at = True, self._clock() + _PAUSE_S

    def _capture(self) -> None:
        self._settle()
        with self._counted():
            self._steps.capture_next()
        self._next_at = self._clock() + _PAUSE_S
