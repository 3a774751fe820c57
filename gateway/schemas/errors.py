"""Renders every failure in the shape of the API that the request used.

That is OpenAI's, {"error": {message, type, param, code}}, but for paths of Anthropic's API and of Ollama's.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from pydantic_core import PydanticCustomError

# Prompt processes raise these errors too, and start a quarter faster without the web framework.
if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from starlette.types import Scope

logger = structlog.get_logger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


# Sockets and files by their path (of at least two parts), hosts with a port, gRPC's address schemes.
_INTERNAL = re.compile(
    r"(?:unix(?:-abstract)?|ipv[46]|dns):[^\s,;'\")\]]+"
    r"|(?<![\w.~])~?/[\w.+~@%-]+(?:/[^\s:,;'\")\]]*)+"
    r"|\[[0-9a-fA-F:]+\]:\d+"
    r"|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b"
    r"|\b[\w.-]+:\d{2,5}\b"
)


def without_addresses(text: str) -> str:
    """Returns `text` without paths and network addresses, which are internal and not for clients."""
    return _INTERNAL.sub("(internal)", text)


class ApiError(Exception):
    """A failure with an HTTP answer; raised anywhere below a route, rendered once by the handler."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Returns the JSON object that clients get, in answers and in SSE error events."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default)
        # A 4xx describes the client's own input; messages about failures here may name internals.
        message = self.message if self.status < 500 else without_addresses(self.message)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Returns `Retry-After` (seconds) when waiting helps, `WWW-Authenticate` with 401, `Connection`."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (413, 415):
            headers["Connection"] = "close"  # else the rest of the body would still be read
        return headers

    def response(self, scope: Scope) -> JSONResponse:
        """Returns the HTTP answer to the request of `scope`, in the shape of its path's API."""
        from fastapi.responses import JSONResponse

        path, status, body = scope["path"], self.status, self.body()
        if is_anthropic(scope):
            status, body = anthropic_error(self, scope.get("state", {}).get("request_id"))
        elif path.startswith(OLLAMA_PATH):
            body = ollama_error(self)
        return JSONResponse(body, status_code=status, headers=self.headers())


def is_anthropic(scope: Scope) -> bool:
    """Returns whether a request is of Anthropic's API: by its path, or by the header of its clients."""
    if scope["path"].startswith(MESSAGES_PATH):
        return True
    is_shared = scope["path"].startswith(MODELS_PATH)
    return is_shared and any(name == b"anthropic-version" for name, _ in scope.get("headers", ()))


MESSAGES_PATH = "/v1/messages"
MODELS_PATH = "/v1/models"
OLLAMA_PATH = "/api/"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
THREAD_UNSUPPORTED = "thread_unsupported_request"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_error(error: ApiError, request_id: str | None) -> tuple[int, dict[str, Any]]:
    """Returns status and body in Anthropic's shape; 503 becomes overloaded, 529."""
    status = 529 if error.status == 503 else error.status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.body()["error"]["message"]
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        message = f"prompt is too long: {message}"  # agents compact their conversation on these words
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    if error.code == THREAD_UNSUPPORTED:
        body["error"]["details"] = {"error_code": error.code, "unsupported": []}
    if request_id is not None:
        body["request_id"] = request_id
    return status, body


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Returns the body in Ollama's shape."""
    return {"error": error.body()["error"]["message"]}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Returns a 400 that names the parameter at fault."""
    return ApiError(400, message, param=param, code=code)


# Statuses that gRPC itself gives to calls whose connection ends, and its messages for that.
_OF_TRANSPORT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
)
_TRANSPORT = re.compile(
    r"stream removed|stream closed|socket closed|connection (?:reset|refused|closed|timed out|attempt)"
    r"|failed to connect|broken pipe|rst_stream|goaway|endpoint|transport|http2|keepalive|ping timeout"
    r"|recvmsg|sendmsg|handshak|tcp|dns|name resolution|resolver|channel|cancell|subchannel|eof\b",
    re.IGNORECASE,
)


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether a call failed because its connection ended or was not made."""
    if error.code() == grpc.StatusCode.CANCELLED:
        return True
    return error.code() in _OF_TRANSPORT and _TRANSPORT.search(error.details() or "") is not None


def from_grpc(error: grpc.aio.AioRpcError) -> ApiError:
    """Returns the HTTP meaning of an engine's gRPC status (protos/engine.proto says which it uses)."""
    details = error.details() or "no details"
    status = grpc.StatusCode.UNAVAILABLE if is_lost(error) else error.code()
    if status == grpc.StatusCode.INVALID_ARGUMENT:
        return ApiError(400, details, code="invalid_value")
    if status == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ApiError(
            429, f"the engine's queue is full: {details}", code="engine_overloaded", retry_after_s=1
        )
    if status == grpc.StatusCode.UNAVAILABLE:
        # The engine's own messages are meant for clients; gRPC's name its streams and sockets.
        is_own = not is_lost(error) and without_addresses(details) == details
        reason = details if is_own else "it is starting, or was lost"
        return ApiError(
            503, f"the engine is not available: {reason}", code="engine_unavailable", retry_after_s=2
        )
    if status == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ApiError(504, f"the engine did not answer in time: {details}", code="engine_timeout")
    if status == grpc.StatusCode.UNKNOWN:  # an unexpected error of the engine: its name is for the log
        return ApiError(500, "the engine failed unexpectedly: its log says why", code="engine_error")
    return ApiError(500, f"the engine failed ({status.name}): {details}", code="engine_error")


def to_api_error(error: Exception) -> ApiError:
    """Returns any exception as an ApiError; unexpected ones are logged, and clients get only their type."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_grpc(error)
    logger.error("unexpected error", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    from fastapi.exceptions import RequestValidationError

    assert isinstance(error, RequestValidationError)
    message, param, code = describe_validation_error(error.errors())
    return bad_request(message, param, code).response(request.scope)


# Paths of other servers, which their clients request.
_OTHER_PATHS = {
    # Text-generation-inference
    "/generate_stream": "here POST /generate, /v1/chat/completions or /v1/completions, with stream",
    # ollama
    **dict.fromkeys(
        ("/api/create", "/api/copy", "/api/push", "/api/delete"),
        "models are managed on the host that serves: moebius pull, list and rm",
    ),
    # vLLM and SGLang
    "/start_profile": "profiles are for operators: moebius profile, on the host that serves",
    "/stop_profile": "profiles are for operators: moebius profile, on the host that serves",
    "/reload": "models of a file with `models` are reloaded",
    "/update_weights_from_disk": "models of a file with `models` are reloaded",
}


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    from starlette.exceptions import HTTPException

    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = request.url.path
        hint = f"; {_OTHER_PATHS[path]}" if path in _OTHER_PATHS else ""
        message, code = f"unknown path: {request.method} {path}{hint}", "unknown_url"
    elif error.status_code == 405:
        message, code = f"{request.method} is not allowed on {request.url.path}", "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    response = ApiError(error.status_code, message, code=code).response(request.scope)
    response.headers.update(error.headers or {})
    return response


async def _on_exception(request: Request, error: Exception) -> JSONResponse:
    return to_api_error(error).response(request.scope)


def install_error_handlers(app: FastAPI) -> None:
    """Renders every failure of `app` through this module."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ApiError, _on_exception)
    app.add_exception_handler(grpc.aio.AioRpcError, _on_exception)
    app.add_exception_handler(Exception, _on_exception)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 80, 80, 80
_LONGEST_PARAM = 200
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
}


def param_error(param: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """Returns a validator's error about `param`, whichever validator raises it."""
    return PydanticCustomError("param_error", "{message}", {"message": message, "param": param, "code": code})


def _is_union_tag(part: object) -> bool:
    """Returns whether a part of a location is a union member's name; field names never look like these."""
    tags = {"str", "int", "float", "bool", "none", "dict"}
    return isinstance(part, str) and (part in tags or "[" in part or "-" in part)


def _param_of(location: Sequence[str | int]) -> str:
    """Returns `messages[0].role` for `("body", "messages", 0, "role")`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _is_union_tag(part) and not (part == "body" and not text):
            text = _joined(text, part)
    return text


def describe_validation_error(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None, str]:
    """Returns message, parameter (dotted path) and code of the most specific error.

    A value that fits no member of a union gives one error per member: the one deepest in the value is the
    most specific.
    """
    first_root = _param_of(errors[0]["loc"][:2])
    related = [error for error in errors if _param_of(error["loc"][:2]) == first_root]
    error = max(related, key=lambda item: len(item["loc"]))
    context = error.get("ctx") or {}
    if "param" in context:
        return str(context["message"]), str(context["param"]), str(context["code"])
    if error["type"] == "extra_forbidden":  # its name is the client's, also if it looks like a tag
        param: str | None = _joined(_param_of(error["loc"][:-1]), str(error["loc"][-1]))[:_LONGEST_PARAM]
        return f"unknown parameter: {param!r}", param, _CODES[error["type"]]
    param = _param_of(error["loc"])[:_LONGEST_PARAM] or None
    code = _CODES.get(error["type"], "invalid_value")
    if error["type"] == "missing":
        return f"missing required parameter: {param!r}", param, code
    if param is None:
        return f"the body must be a JSON object: {error['msg']}", None, code
    return f"invalid value for {param!r}: {error['msg']} (got {shown(error.get('input'))})", param, code


def _joined(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def shown(value: object) -> str:
    """Returns a short form of the offending value, without formatting all of it."""
    return _SHORT.repr(value)
