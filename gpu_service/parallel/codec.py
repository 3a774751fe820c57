"""Messages of the engine's inbox as bytes: a JSON object, then images, then all prompts as int32.

Only plain data travels; a receiver rebuilds dataclasses from known fields and refuses all others.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from gpu_service.engine.inbox import Abort, Add, Call, Flush, Message, Stop
from gpu_service.parallel.image_codec import ImageReceiver, ImageSender
from gpu_service.request import Request, SamplingParams

_LENGTH = struct.Struct("!I")
_PARAMS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def encode_messages(messages: Sequence[Message]) -> bytes:
    """What rank 0 sends in one iteration of its loop."""
    prompts: list[np.ndarray[Any, np.dtype[np.int32]]] = []
    images = ImageSender()
    items = [_encode(message, prompts, images) for message in messages]
    header = json.dumps({"messages": items, "images": images.facts}).encode()
    tail = b"".join(prompt.tobytes() for prompt in prompts)
    return _LENGTH.pack(len(header)) + header + images.tail + tail


def decode_messages(payload: bytes) -> list[Message]:
    """What the others apply; equal in all that the scheduler and the sampler read.

    Raises ValueError when the payload is not what `encode_messages` makes.
    """
    (length,) = _LENGTH.unpack_from(payload)
    header = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
    images = ImageReceiver(header["images"], payload, _LENGTH.size + length)
    prompts = _Prompts(np.frombuffer(payload, "<i4", offset=images.end))
    messages = [_decode(item, prompts, images) for item in header["messages"]]
    prompts.check_spent()
    return messages


class _Prompts:
    """The tail of a payload, handed out in order."""

    def __init__(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self._tokens, self._position = tokens, 0

    def take(self, count: int) -> list[int]:
        begin, self._position = self._position, self._position + count
        taken: list[int] = self._tokens[begin : self._position].tolist()
        return taken

    def check_spent(self) -> None:
        if self._position != len(self._tokens):
            raise ValueError(f"{len(self._tokens)} prompt tokens arrived for {self._position} announced")


def _encode(
    message: Message, prompts: list[np.ndarray[Any, np.dtype[np.int32]]], images: ImageSender
) -> list[Any]:
    match message:
        case Add(requests):
            prompts += [np.asarray(request.prompt_token_ids, "<i4") for request in requests]
            return ["add", [_encode_request(request, images) for request in requests]]
        case Abort(request_id):
            return ["abort", request_id]
        case Flush():
            return ["flush"]
        case Call(operation, argument):
            return ["call", operation, argument]
        case Stop():
            return ["stop"]


def _decode(item: list[Any], prompts: _Prompts, images: ImageReceiver) -> Message:
    match item:
        case ["add", list() as requests]:
            return Add(tuple(_decode_request(request, prompts, images) for request in requests))
        case ["abort", str() as request_id]:
            return Abort(request_id)
        case ["flush"]:
            return Flush(Future())
        case ["call", str() as operation, str() as argument]:
            return Call(operation, argument, Future())
        case ["stop"]:
            return Stop()
    raise ValueError(f"unknown message {item!r}")


def _encode_request(request: Request, images: ImageSender) -> dict[str, Any]:
    params = dataclasses.asdict(request.params)
    params["stop_token_ids"] = sorted(request.params.stop_token_ids)
    return {
        "id": request.request_id,
        "index": request.index,
        "priority": request.priority,
        "namespace": request.cache_namespace,
        "tokens": len(request.prompt_token_ids),
        "params": params,
        "images": images.places(request.vision),
    }


def _decode_request(fields: dict[str, Any], prompts: _Prompts, images: ImageReceiver) -> Request:
    params = dict(fields["params"])
    if set(params) != _PARAMS:
        raise ValueError(f"sampling parameters {sorted(params)} arrived; {sorted(_PARAMS)} expected")
    params["stop_token_ids"] = frozenset(params["stop_token_ids"])
    params["logit_bias"] = tuple((token, value) for token, value in params["logit_bias"])
    return Request(
        request_id=fields["id"],
        prompt_token_ids=prompts.take(fields["tokens"]),
        params=SamplingParams(**params),
        index=fields["index"],
        priority=fields["priority"],
        cache_namespace=fields["namespace"],
        vision=images.vision(fields["images"], fields["tokens"]),
    )
