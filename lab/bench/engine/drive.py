"""Drives an engine without HTTP or gRPC: submits requests, notes when which tokens came."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from moebius.config import MoebiusConfig
from moebius.errors import EngineLost, UserError

if TYPE_CHECKING:
    from gpu_service.assembly.build import Built
    from gpu_service.core.constraint import OutputConstraint
    from gpu_service.core.interface import Emission
    from gpu_service.core.request import Request
    from gpu_service.experts.streaming.streamer import ExpertStreamer

STEP_TIMEOUT_S = 600.0
# Registering 500 GB takes half a minute.
_READY_S = 600.0
_ENDED = 1 << 40
# Engines that were lost, kept until the process ends: freeing what they hold on the device aborts it.
_lost: list[Built] = []


class TokenEvent(NamedTuple):
    """New tokens of one stream; filled by `EngineUnderTest`. Seconds on the clock of time.perf_counter."""

    at: float
    stream: int
    tokens: int
    ended: bool
    token_ids: tuple[int, ...] = ()


@dataclass
class Streams:
    """Requests in flight together. Events cost the engine's thread little, whatever waits for them."""

    submitted: float
    count: int
    request_ids: list[str] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    error: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)
    # Tokens of each stream so far, very many once it has ended.
    _tokens: Counter[int] = field(default_factory=Counter)

    def add(self, events: Sequence[TokenEvent]) -> None:
        """Appends what a step brought; called by the engine's thread."""
        with self.changed:
            self.events += events
            for event in events:
                self._tokens[event.stream] += _ENDED if event.ended else event.tokens
            self.changed.notify_all()

    def wait(self, minimum: int) -> float:
        """Waits until every stream has `minimum` tokens or has ended; returns when the last one had.
        Raises UserError."""
        end = time.perf_counter() + STEP_TIMEOUT_S
        with self.changed:
            while self._reached(minimum) < self.count:
                if self.error:
                    raise UserError(f"a request failed: {self.error}")
                if not self.changed.wait(max(0.0, end - time.perf_counter())):
                    raise UserError(f"no token within {STEP_TIMEOUT_S:.0f} s")
            if self.error:
                raise UserError(f"a request failed: {self.error}")
            return self.events[-1].at

    def outputs(self) -> list[list[int]]:
        """Returns token ids of every stream so far."""
        return [
            [token for event in self.events if event.stream == stream for token in event.token_ids]
            for stream in range(self.count)
        ]

    def _reached(self, minimum: int) -> int:
        return sum(found >= minimum for found in self._tokens.values())


class EngineUnderTest:
    """A built, warm engine."""

    def __init__(self, built: Built) -> None:
        self.built = built
        # Of every request that has not ended: its set of streams, and which of them it is.
        self._numbers: dict[Request, tuple[Streams, int]] = {}
        self._runs = 0

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float,
        constraints: Sequence[OutputConstraint] = (),
        namespace: str = "",
    ) -> Streams:
        """Starts one stream per prompt; they never end early. `constraints`: of the first ones. `namespace`:
        within which prefixes are shared; empty: with no other call.

        Raises UserError for streams that the model's context cannot hold.
        """
        from gpu_service.core.request import Request, RequestRefused, SamplingParams

        self._runs += 1
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        shared = namespace or str(self._runs)
        requests = [
            Request(f"bench-{self._runs}-{number}", list(prompt), params, cache_namespace=shared)
            for number, prompt in enumerate(prompts)
        ]
        for request, constraint in zip(requests, constraints, strict=False):
            request.constraint = constraint
        streams = Streams(time.perf_counter(), len(requests), [request.request_id for request in requests])
        self._numbers |= {request: (streams, number) for number, request in enumerate(requests)}
        for request in requests:
            try:
                self.built.engine.submit([request])
            except RequestRefused as error:
                raise UserError(f"a stream of this benchmark is refused: {error}") from None
        return streams

    def abort(self, streams: Streams) -> None:
        """Ends streams before their time; returns when they have ended."""
        for request_id in streams.request_ids:
            self.built.engine.abort(request_id)
        streams.wait(1 << 30)

    def on_output(self, emission: Emission) -> None:
        """Called by the engine's thread."""
        now, found = time.perf_counter(), dict[int, tuple[Streams, list[TokenEvent]]]()

        def note(request: Request, token_ids: tuple[int, ...], ended: bool) -> Streams | None:
            streams, number = self._numbers.get(request, (None, 0))
            if streams is not None:
                _, events = found.setdefault(id(streams), (streams, []))
                events.append(TokenEvent(now, number, len(token_ids), ended, token_ids))
            return streams

        for request, token_id, _ in emission.tokens():
            note(request, (token_id,), False)
        for delta in emission.deltas:
            streams = note(delta.request, delta.token_ids, delta.finish_reason is not None)
            if delta.finish_reason is not None:
                self._numbers.pop(delta.request, None)
            if streams is not None:
                streams.error = streams.error or delta.error_message
        for streams, events in found.values():
            streams.add(events)


@contextlib.contextmanager
def running_engine(config: MoebiusConfig) -> Iterator[EngineUnderTest]:
    """Loads, warms up, and closes at the end. Raises what `moebius gpu` would end with.

    Raises EngineLost in place of what follows from the loss of the engine.
    """
    from gpu_service.assembly.build import WarmUpGate, build_engine
    from gpu_service.core.interface import NullObserver

    forget_predecessor()
    gate = WarmUpGate()
    built = build_engine(config, NullObserver(), gate.on_output)
    built.engine.start()
    engine: EngineUnderTest | None = None
    try:
        vocab_size, seconds = built.model_config.vocab_size, config.supervisor.ready_timeout_s
        gate.run(built.engine, vocab_size, seconds, built.warm_up_tokens)
        built.memory.seal()
        engine = EngineUnderTest(built)
        built.engine.on_output = engine.on_output
        yield engine
    except UserError as error:
        if built.engine.is_alive:
            raise
        _lost.append(built)
        raise EngineLost(f"the engine is lost, and its log says where: {error}") from error
    finally:
        if not any(built is lost for lost in _lost):
            built.close()
        if engine is not None:
            # The caller's name for it lives on while the next engine looks for memory.
            del engine.built


def wait_until_streaming(streamer: ExpertStreamer, timeout_s: float = _READY_S) -> None:
    """Waits until the servers' memory is registered; the engine must be idle. Raises UserError."""
    deadline = time.monotonic() + timeout_s
    while not streamer.can_stream:
        if time.monotonic() > deadline:
            raise UserError(f"experts cannot be streamed after {timeout_s:.0f} s; the log says why")
        time.sleep(0.05)


def forget_predecessor() -> None:
    """Frees what an earlier engine of this process held: its mailbox is one's own until it is collected."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class DecodeWindow:
    """The time in which all streams decode and none has ended; filled by `decode_window`."""

    seconds: float
    tokens: int
    steps: int  # Steps that gave tokens in it: events of the stream with most of them.

    @property
    def tokens_per_second(self) -> float:
        """The rate of all streams together, tokens/s."""
        return self.tokens / self.seconds

    @property
    def seconds_per_step(self) -> float:
        """Seconds from one step's tokens to the next one's."""
        return self.seconds / max(1, self.steps)


def decode_window(events: Sequence[TokenEvent], streams: int) -> DecodeWindow:
    """The tokens and seconds from the moment every stream has its first token to the first stream's end.

    What the first moment's own step gave is not counted: it was computed before. Raises ValueError when a
    stream ended before another had begun.
    """
    first: dict[int, float] = {}
    ends: list[float] = []
    for event in events:
        if event.tokens:
            first.setdefault(event.stream, event.at)
        if event.ended:
            ends.append(event.at)
    if len(first) < streams or not ends or min(ends) <= max(first.values()):
        raise ValueError("the streams never decoded together: more tokens per stream are needed")
    begin, end = max(first.values()), min(ends)
    within = [event for event in events if begin < event.at <= end and event.tokens]
    per_stream = [sum(event.stream == number for event in within) for number in range(streams)]
    return DecodeWindow(end - begin, sum(event.tokens for event in within), max(per_stream))
