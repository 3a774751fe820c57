"""Bytes that are no message: INVALID_ARGUMENT from either kind of gRPC server, through an interceptor.

Left to gRPC, the one of threads keeps a broken stream's call for good (6 KB each), the one of asyncio answers
UNKNOWN, and both log a traceback of our code for what a client sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for a message until the call's handler refuses it."""

    reason: str


def _tolerant(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_note(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return decode_or_note


class RefuseUndecodable(grpc.ServerInterceptor):
    """The interceptor for `grpc.server`."""

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Returns the method's handler, which first looks at what it is given; None for an unknown method."""
        handler = continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        if handler.request_streaming:
            wrapped = {"stream_stream": _checked_stream(handler.stream_stream)}
        elif handler.response_streaming:
            wrapped = {"unary_stream": _checked(handler.unary_stream)}
        else:
            wrapped = {"unary_unary": _checked(handler.unary_unary)}
        return handler._replace(request_deserializer=_tolerant(handler.request_deserializer), **wrapped)


def _checked(behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def answer(request: Any, context: Any) -> Any:
        if isinstance(request, _Undecodable):
            _refuse(context, request)
        return behaviour(request, context)

    return answer


def _checked_stream(behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def messages(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            if isinstance(request, _Undecodable):
                _refuse(context, request)
            yield request

    return lambda requests, context: behaviour(messages(requests, context), context)


def _refuse(context: Any, request: _Undecodable) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.reason)
    raise AssertionError("abort returned")


class RefuseUndecodableAsync(grpc.aio.ServerInterceptor):
    """The interceptor for `grpc.aio.server`; of methods that take one message."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wraps a handler, as `RefuseUndecodable.intercept_service`."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None or handler.request_streaming:
            return handler
        if handler.response_streaming:
            wrapped: dict[str, Any] = {"unary_stream": _checked_messages(handler.unary_stream)}
        else:
            wrapped = {"unary_unary": _checked_answer(handler.unary_unary)}
        return handler._replace(request_deserializer=_tolerant(handler.request_deserializer), **wrapped)


def _checked_answer(behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        if isinstance(request, _Undecodable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.reason)
        return await behaviour(request, context)

    return answer


def _checked_messages(
    behaviour: Callable[[Any, Any], AsyncIterator[Any]],
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, _Undecodable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.reason)
        async for answer in behaviour(request, context):
            yield answer

    return answers
