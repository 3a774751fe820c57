"""What goes into the engine and what comes out: messages to its thread, token deltas, load, its observer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from opentelemetry.context import Context

from gpu_service.core.request import FinishReason, Request, TokenLogprobs
from gpu_service.core.results import StepResult
from gpu_service.core.step import Batch


@dataclass(frozen=True, slots=True)
class Add:
    """Queue the outputs of one request."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End all outputs of a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Drop unheld prefixes; the future gets the number of pages freed."""

    done: Future[int]


@dataclass(frozen=True, slots=True)
class RunOperation:
    """Run a named operation between two steps, on every rank; the future gets its end on the caller's."""

    operation: str
    argument: str
    done: Future[None]

    def run(self, operations: Mapping[str, Callable[[str], None]], fatal: type[Exception]) -> None:
        """Runs it, by the engine thread. An error is the caller's, wherever that is; a `fatal` one is raised
        here, too.
        """
        try:
            operations[self.operation](self.argument)
        except Exception as error:
            self.done.set_exception(error)
            if isinstance(error, fatal):
                raise
        else:
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine thread."""


Message = Add | Abort | Flush | RunOperation | Stop


@dataclass(frozen=True, slots=True)
class LaneSight:
    """What a host sees of the prefill lane, and of several ranks each would see at another time.

    Filled by the engine; of several ranks all go by what the first one saw.
    """

    # Whether the lane's open step, and the oldest step in flight of the main lane, have ended.
    lane_has_ended: bool = False
    main_has_ended: bool = False
    # As `LaneRunner` says.
    is_ready: bool = False
    min_tokens: tuple[int, int] = (2, 2)
    step_tokens: int = 0


class Inbox:
    """Any thread posts, the engine thread drains; order is kept."""

    # Whether messages enter here: of several ranks, at the first one's.
    is_entry = True
    # Whether no other rank applies the same messages.
    is_alone = True

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._messages: list[Message] = []
        # Outputs posted but not drained.
        self.num_added = 0
        # What the engine goes by until the next drain, and how this rank finds it out; the engine sets that.
        self.sight = LaneSight()
        self.look: Callable[[], LaneSight] = lambda: self.sight
        # What the first of several ranks adds to the outputs of a request before the others get them.
        self.prepare: Callable[[Sequence[Request]], None] = lambda requests: None

    def post(self, message: Message) -> None:
        """Appends a message and wakes the engine thread."""
        with self._condition:
            self._messages.append(message)
            if isinstance(message, Add):
                self.num_added += len(message.requests)
            self._condition.notify()

    def wait(self, timeout_s: float) -> None:
        """Blocks until there is a message, at most so long."""
        with self._condition:
            if not self._messages:
                self._condition.wait(timeout_s)

    def drain(self, wait: bool) -> list[Message]:
        """Returns all messages so far; with `wait`, blocks until there is one. Sets `sight`."""
        with self._condition:
            while wait and not self._messages:
                self._condition.wait()
            messages, self._messages = self._messages, []
            self.num_added = 0
        self.sight = self.look()
        return messages

    def go_on(self) -> None:
        """The lane's next layer is launched. Of several ranks, the first one's: the others launch it, too."""

    def is_to_drain(self) -> bool:
        """Between two layers of the lane: whether the first rank drains once more before the next one.

        Blocks until that is known. Only for ranks whose inbox is not the entry.
        """
        raise RuntimeError("messages enter at this rank, which decides when they are drained")


@dataclass(slots=True)
class OutputDelta:
    """New tokens of one output; a snapshot that later steps do not change. Filled by `delta_of`.

    Not frozen, since every token of every output has one and a frozen one takes three times as long to make.
    """

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    # All of the prompt's, with the first token of the output; else empty.
    prompt_logprobs: tuple[TokenLogprobs, ...]
    # Output tokens emitted up to and with this delta.
    num_output_tokens: int
    cached_tokens: int
    # Draft tokens verified up to and with this delta, by whether they became output tokens.
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    finish_reason: FinishReason | None
    matched_stop_token: int | None
    error_message: str


def delta_of(request: Request) -> OutputDelta:
    """Returns what is new since the last call for this request; called by the engine thread."""
    start = request.reported_len
    request.reported_len = end = len(request.output_token_ids)
    return OutputDelta(
        request,
        tuple(request.output_token_ids[start:]),
        tuple(request.output_logprobs[start:]) if request.output_logprobs else (),
        tuple(request.prompt_logprobs) if start == 0 else (),
        end,
        request.cached_len,
        request.accepted_draft_tokens,
        request.rejected_draft_tokens,
        request.finish_reason,
        request.matched_stop_token,
        request.error_message,
    )


def token_delta(request: Request, token_id: int, count: int) -> OutputDelta:
    """Returns the delta of an output that goes on, of one token and nothing else; `count` with it."""
    drafts = request.accepted_draft_tokens, request.rejected_draft_tokens
    return OutputDelta(request, (token_id,), (), (), count, request.cached_len, *drafts, None, None, "")


@dataclass(slots=True, eq=False)
class Emission(Sequence[OutputDelta]):
    """What is new of outputs after a step; iterated, a delta of each. Filled by `take_tokens` and the engine.

    Of most outputs a step brings one token and nothing else: those are kept in columns, since a delta of each
    costs more than all else that is done with a token.
    """

    deltas: list[OutputDelta] = field(default_factory=list)
    # Outputs that began before and go on, their new tokens, and how many each has with that.
    requests: list[Request] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return len(self.token_ids) + sum(len(delta.token_ids) for delta in self.deltas)

    def __len__(self) -> int:
        return len(self.requests) + len(self.deltas)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def tokens(self) -> Iterator[tuple[Request, int, int]]:
        """Returns the rows of the columns."""
        return zip(self.requests, self.token_ids, self.counts, strict=True)

    def __iter__(self) -> Iterator[OutputDelta]:
        yield from itertools.starmap(token_delta, self.tokens())
        yield from self.deltas


def take_tokens(batch: Batch, token_ids: list[int]) -> tuple[Emission, list[int]]:
    """Gives each output of a step of the main lane the token that the step sampled, if the output began
    before and goes on.

    Returns what is new of them, and which of the batch's requests are others, none of which is changed.
    """
    requests, starts, positions = batch.requests, batch.start_positions, batch.output_positions
    others = [
        index
        for index, (request, token_id, position) in enumerate(
            zip(requests, token_ids, positions, strict=True)
        )
        if position == 0
        or position + 1 >= request.longest_output
        or token_id in request.ending_ids
        or request.slot < 0
        or request.constraint is not None
    ]
    if others:
        left = set(others)
        going = [index for index in range(len(requests)) if index not in left]
        requests, starts = [requests[index] for index in going], [starts[index] for index in going]
        token_ids, positions = [token_ids[index] for index in going], [positions[index] for index in going]
    counts = [position + 1 for position in positions]
    for request, start, token_id, count in zip(requests, starts, token_ids, counts, strict=True):
        request.output_token_ids.append(token_id)
        request.inflight_tokens -= 1
        request.computed_len = start + 1
        request.reported_len = count
    return Emission([], requests, token_ids, counts), others


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of queues and cache; filled by the engine thread after every step."""

    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0  # owned by running requests or locked by them
    cached_pages: int = 0  # held by the prefix tree only
    kept_pages: int = 0  # of these, given up last
    usable_pages: int = 1  # what there may be, also where experts have their memory now
    num_preemptions: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    # Of requests in steps with drafts: how often they had some, how many, and how many were accepted.
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class EngineObserver(Protocol):
    """Metrics and traces hang here. Called by the engine thread (`submitted`: by the caller's)."""

    def submitted(self, request: Request) -> None:
        """The request was accepted into the queue."""

    def launched(self, batch: Batch) -> Context | None:
        """A step is about to be launched; returns the trace context its expert spans hang under."""

    def committed(self, batch: Batch, result: StepResult | None, emission: Emission) -> None:
        """A step's results were applied; None when the step failed."""

    def ended(self, deltas: list[OutputDelta]) -> None:
        """Requests ended outside a step (abort, shutdown)."""

    def loaded(self, load: EngineLoad) -> None:
        """A new snapshot is there."""

    def corrupted(self, error: AssertionError) -> None:
        """An integrity check failed at idle."""


class NullObserver:
    """Observes nothing."""

    def submitted(self, request: Request) -> None:
        """Does nothing."""

    def launched(self, batch: Batch) -> Context | None:
        """Never traced."""
        return None

    def committed(self, batch: Batch, result: StepResult | None, emission: Emission) -> None:
        """Does nothing."""

    def ended(self, deltas: list[OutputDelta]) -> None:
        """Does nothing."""

    def loaded(self, load: EngineLoad) -> None:
        """Does nothing."""

    def corrupted(self, error: AssertionError) -> None:
        """Does nothing: the engine logs it."""
