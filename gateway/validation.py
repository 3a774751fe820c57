"""Turns pydantic's findings into one message, the name of the parameter and a code."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 80, 80, 80
_LONGEST_PARAM = 200
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
}


def param_error(param: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """For validators: an error about `param`, whatever the validator it is raised in."""
    return PydanticCustomError("param_error", "{message}", {"message": message, "param": param, "code": code})


def _is_union_tag(part: object) -> bool:
    """Pydantic puts names of union members into the location; field names never look like these."""
    tags = {"str", "int", "float", "bool", "none", "dict"}
    return isinstance(part, str) and (part in tags or "[" in part or "-" in part)


def _param_of(location: Sequence[str | int]) -> str:
    """`("body", "messages", 0, "role")` -> `messages[0].role`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _is_union_tag(part) and not (part == "body" and not text):
            text = _joined(text, part)
    return text


def describe_validation_error(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None, str]:
    """Message, parameter (dotted path) and code of the most telling error.

    A value that fits no member of a union gives one error per member: the one deepest in the value says
    most about what was meant.
    """
    first_root = _param_of(errors[0]["loc"][:2])
    related = [error for error in errors if _param_of(error["loc"][:2]) == first_root]
    error = max(related, key=lambda item: len(item["loc"]))
    context = error.get("ctx") or {}
    if "param" in context:
        return str(context["message"]), str(context["param"]), str(context["code"])
    if error["type"] == "extra_forbidden":  # its name is the client's, whatever it looks like
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
    """A short form of the offending value, made without spelling out all of it."""
    return _SHORT.repr(value)
