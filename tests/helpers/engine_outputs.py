"""What a running engine emits, and waits for it: the base of all engines that tests run."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from gpu_service.core.interface import Emission, OutputDelta
from gpu_service.core.request import Request
from gpu_service.engine.engine import Engine

WAIT_S = 120.0


class EngineOutputs:
    """An engine, set by its maker, whose callback is `on_output`."""

    engine: Engine
    # Whether requests may end with an error.
    may_fail = False

    def __init__(self) -> None:
        # By request key, in the order of their emission.
        self.deltas: dict[str, list[OutputDelta]] = {}
        # By identity, as requests of one test may have the key of earlier ones.
        self._ended: dict[int, Request] = {}
        self._changed = threading.Condition()

    def on_output(self, emission: Emission) -> None:
        """Called by the engine thread."""
        with self._changed:
            for delta in emission:
                self.deltas.setdefault(delta.request.key, []).append(delta)
                if delta.finish_reason is not None:
                    self._ended[id(delta.request)] = delta.request
            self._changed.notify_all()

    def tokens(self, request: Request) -> list[int]:
        """Returns all tokens emitted so far."""
        return [token for delta in self.deltas.get(request.key, []) for token in delta.token_ids]

    def have_ended(self, requests: Sequence[Request]) -> bool:
        """Returns whether each request has emitted its end."""
        return all(id(request) in self._ended for request in requests)

    def wait_tokens(self, requests: Sequence[Request], count: int | None = None) -> None:
        """Waits until each request has emitted its end, or `count` tokens."""

        def missing() -> list[str]:
            left = [request for request in requests if id(request) not in self._ended]
            return [request.key for request in left if count is None or len(self.tokens(request)) < count]

        with self._changed:
            assert self._changed.wait_for(lambda: not missing(), WAIT_S), f"unfinished: {missing()}"

    def wait(self, requests: Sequence[Request]) -> list[list[int]]:
        """Returns the tokens of each request once all have ended, without an error unless they `may_fail`."""
        self.wait_tokens(requests)
        if not self.may_fail:
            assert [request.error_message for request in requests] == [""] * len(requests)
        return [request.output_token_ids for request in requests]

    def run(self, requests: Sequence[Request], *, together: bool = False) -> list[list[int]]:
        """Submits all, and returns the tokens of each once all have ended.

        `together`: all are queued before the first step, so that every run schedules alike.
        """
        for group in [requests] if together else [[request] for request in requests]:
            self.engine.submit(group)
        return self.wait(requests)
