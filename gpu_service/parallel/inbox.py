"""Inboxes of several ranks: rank 0 decides what each iteration of the loop applies, the others repeat it.

The scheduler is deterministic, so equal messages at equal iterations give equal batches on every rank, and
no batch is ever sent. A rank's loop may run after rank 0's by what the connection holds; the collectives
of the steps bound that. Messages travel as `protos/ranks.proto`, images each once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_service.core.constraint import ConstraintCompiler
from gpu_service.core.images import PreparedImage, PromptImage, locate
from gpu_service.core.interface import Abort, Add, Flush, Inbox, LaneSight, Message, RunOperation, Stop
from gpu_service.core.request import Pooling, Request, SamplingParams
from gpu_service.parallel.control import RankControl
from protos import engine_pb2, ranks_pb2

_PIXEL = np.dtype("<f4")
# Fields of `SamplingParams` that engine.proto has under the same name and in a type of the same values.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "seed"),
    "pooling",
)


def encode_messages(messages: Sequence[Message]) -> ranks_pb2.Iteration:
    """Returns what rank 0 sends in one iteration of its loop."""
    iteration = ranks_pb2.Iteration()
    images: dict[int, int] = {}
    for message in messages:
        sent = iteration.messages.add()
        match message:
            case Add(requests):
                sent.add.SetInParent()
                for request in requests:
                    _encode_request(request, sent.add.outputs.add(), iteration, images)
            case Abort(request_id):
                sent.abort_request_id = request_id
            case Flush():
                sent.flush.SetInParent()
            case RunOperation(operation, argument):
                sent.call.operation, sent.call.argument = operation, argument
            case Stop():
                sent.stop.SetInParent()
    return iteration


def decode_messages(
    iteration: ranks_pb2.Iteration, compiler: ConstraintCompiler | None = None
) -> list[Message]:
    """Returns what the others apply; equal in all that the scheduler and the sampler read.

    `compiler`: None where rank 0 has none, either. Raises ValueError for what `encode_messages` does not
    make.
    """
    images = [_decode_image(image) for image in iteration.images]
    return [_decode(message, images, compiler) for message in iteration.messages]


def _decode(
    message: ranks_pb2.Message, images: Sequence[PreparedImage], compiler: ConstraintCompiler | None
) -> Message:
    match message.WhichOneof("message"):
        case "add":
            return Add(tuple(_decode_request(output, images, compiler) for output in message.add.outputs))
        case "abort_request_id":
            return Abort(message.abort_request_id)
        case "flush":
            return Flush(Future())
        case "call":
            return RunOperation(message.call.operation, message.call.argument, Future())
        case "stop":
            return Stop()
    raise ValueError("an unknown message arrived: the ranks run different versions")


def _encode_request(
    request: Request, output: ranks_pb2.Output, iteration: ranks_pb2.Iteration, images: dict[int, int]
) -> None:
    output.request_id, output.index, output.priority = request.request_id, request.index, request.priority
    output.cache_namespace, output.fairness_id = request.cache_namespace, request.fairness_id
    output.keep_prefix_s, output.arrived_s = request.keep_prefix_s, request.arrived_s
    output.blocks_on_disk = request.blocks_on_disk
    if request.constraint is not None:
        output.constraint.CopyFrom(request.constraint.source)
    output.prompt_token_ids.extend(request.prompt_token_ids)
    params = request.params
    for name in _SAME:
        if (value := getattr(params, name)) is not None:
            setattr(output.params, name, value)
    output.params.stop_token_ids.extend(sorted(params.stop_token_ids))
    for token, bias in params.logit_bias:
        output.params.logit_bias[token] = bias
    output.params.allowed_token_ids.extend(params.allowed_token_ids)
    output.params.logprob_token_ids.extend(params.logprob_token_ids)
    for sequence in params.bad_words:
        output.params.bad_words.add(token_ids=sequence)
    output.sees_ahead = request.vision is not None and request.vision.sees_ahead
    for placed in () if request.vision is None else request.vision.images:
        key = placed.image.key
        if key not in images:
            images[key] = len(images)
            _encode_image(placed.image, iteration.images.add())
        output.images.add(image=images[key], start=placed.start, first=placed.first, count=placed.count)


def _decode_request(
    output: ranks_pb2.Output, images: Sequence[PreparedImage], compiler: ConstraintCompiler | None
) -> Request:
    placed = [
        PromptImage(images[place.image], place.start, place.first, place.count) for place in output.images
    ]
    constraint = None
    if output.HasField("constraint"):
        if compiler is None:
            raise ValueError("a constraint arrived, but this rank has no tokenizer")
        (constraint,) = compiler.make(output.constraint)
    return Request(
        request_id=output.request_id,
        prompt_token_ids=list(output.prompt_token_ids),
        params=_decode_params(output.params),
        index=output.index,
        priority=output.priority,
        cache_namespace=output.cache_namespace,
        fairness_id=output.fairness_id,
        keep_prefix_s=output.keep_prefix_s,
        arrived_s=output.arrived_s,
        blocks_on_disk=output.blocks_on_disk,
        vision=locate(len(output.prompt_token_ids), placed, output.sees_ahead) if placed else None,
        constraint=constraint,
    )


def _decode_params(params: engine_pb2.SamplingParams) -> SamplingParams:
    same: dict[str, Any] = {name: getattr(params, name) for name in _SAME}
    for name in ("logprobs", "prompt_logprobs"):
        if not params.HasField(name):
            same[name] = None
    same["pooling"] = Pooling(params.pooling)
    return SamplingParams(
        **same,
        stop_token_ids=frozenset(params.stop_token_ids),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words=tuple(tuple(sequence.token_ids) for sequence in params.bad_words),
        logprob_token_ids=tuple(params.logprob_token_ids),
    )


def _encode_image(image: PreparedImage, sent: ranks_pb2.Image) -> None:
    sent.key = image.key
    sent.grid.extend(image.grid)
    sent.token_grid.extend(image.token_grid)
    sent.shape.extend(image.pixels.shape)
    sent.pixels = image.pixels.astype(_PIXEL).tobytes()


def _decode_image(sent: ranks_pb2.Image) -> PreparedImage:
    shape = tuple(sent.shape)
    if len(sent.pixels) != math.prod(shape) * _PIXEL.itemsize:
        raise ValueError(f"an image of shape {shape} arrived with {len(sent.pixels)} bytes of pixels")
    # A copy: torch asks for memory that can be written to, the message's own cannot.
    pixels: npt.NDArray[Any] = np.frombuffer(sent.pixels, _PIXEL).reshape(shape).copy()
    time, rows, columns = sent.grid
    height, width = sent.token_grid
    return PreparedImage(sent.key, pixels, (time, rows, columns), (height, width))


def encode_sight(sight: LaneSight) -> ranks_pb2.LaneSight:
    """Returns the message for `decode_sight`."""
    min_tokens, idle_min_tokens = sight.min_tokens
    return ranks_pb2.LaneSight(
        lane_has_ended=sight.lane_has_ended,
        main_has_ended=sight.main_has_ended,
        is_ready=sight.is_ready,
        min_tokens=min_tokens,
        idle_min_tokens=idle_min_tokens,
        step_tokens=sight.step_tokens,
    )


def decode_sight(sent: ranks_pb2.LaneSight) -> LaneSight:
    """Returns what rank 0 saw."""
    min_tokens = sent.min_tokens, sent.idle_min_tokens
    return LaneSight(sent.lane_has_ended, sent.main_has_ended, sent.is_ready, min_tokens, sent.step_tokens)


class LeaderInbox(Inbox):
    """Rank 0's: what a drain returns is sent to all others first, also when it is nothing."""

    is_alone = False

    def __init__(self, control: RankControl) -> None:
        super().__init__()
        self._control = control

    def drain(self, wait: bool) -> list[Message]:
        messages = super().drain(wait)
        for message in messages:
            if isinstance(message, Add):
                self.prepare(message.requests)
        iteration = encode_messages(messages)
        iteration.sight.CopyFrom(encode_sight(self.sight))
        self._control.publish(iteration)
        return messages

    def go_on(self) -> None:
        self._control.publish(ranks_pb2.Iteration(goes_on=True))


class FollowerInbox(Inbox):
    """Every other rank's: a drain returns what rank 0 drained in the same iteration."""

    is_entry = False
    is_alone = False

    def __init__(self, control: RankControl, compiler: ConstraintCompiler | None = None) -> None:
        super().__init__()
        self._control = control
        self._compiler = compiler
        # Received, but not drained yet.
        self._next: ranks_pb2.Iteration | None = None

    def post(self, message: Message) -> None:
        """Nothing enters here; the end comes from rank 0, so an engine that has ended may post its own."""
        if not isinstance(message, Stop):
            raise RuntimeError(f"messages enter at rank 0, not here: {message!r}")

    def wait(self, timeout_s: float) -> None:
        """Returns at once: rank 0 has waited, and `drain` waits for it."""

    def drain(self, wait: bool) -> list[Message]:
        """Blocks until rank 0 is at the same iteration."""
        iteration, self._next = self._next or self._control.next_iteration(), None
        if iteration.goes_on:
            raise ValueError("rank 0 launches a layer of the prefill lane where this rank drains messages")
        self.sight = decode_sight(iteration.sight)
        return decode_messages(iteration, self._compiler)

    def is_to_drain(self) -> bool:
        iteration = self._control.next_iteration()
        self._next = None if iteration.goes_on else iteration
        return not iteration.goes_on
