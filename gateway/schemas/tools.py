"""Fields of chat requests about tools and reasoning, in all of OpenAI's spellings."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gateway.schemas.common import StrictModel
from gateway.schemas.errors import param_error, shown

MAX_TOOLS = 1024
# Variables of chat templates that other fields set.
_RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Names that formats and grammars support; OpenAI's own are letters, digits, - and _.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")
Mode = Literal["auto", "required", "none"]


@functools.lru_cache(maxsize=512)
def _schema_error(schema: str) -> str:
    """Returns the error in a JSON schema; empty: none. Cached: agents send the same tools each time."""
    import jsonschema  # slow to import, and most requests have no tools

    value = json.loads(schema)
    errors = []
    # Tools do not declare their schema's dialect, and some generators write older ones.
    for dialect in (jsonschema.Draft202012Validator, jsonschema.Draft7Validator, jsonschema.Draft4Validator):
        try:
            dialect.check_schema(value)
            break
        except jsonschema.SchemaError as error:
            errors.append(f"{error.json_path}: {error.message}")
    else:
        return errors[0]
    kind = value.get("type", "object")
    return "" if kind == "object" else f"arguments are an object, not {shown(kind)}"


class ToolFunction(StrictModel):
    """A function that the model may call."""

    place = "tools[].function."
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = Field(None, description="Arguments are constrained to the schema")

    def check(self, param: str) -> None:
        """Raises PydanticCustomError naming `param` for a name or a schema that cannot be used."""
        if not _NAME.fullmatch(self.name):
            raise param_error(
                f"{param}.name",
                f"a tool's name has 1 to 128 letters, digits and _.:/-, got {shown(self.name)}",
            )
        wrong = _schema_error(json.dumps(self.parameters)) if self.parameters else ""
        if wrong:
            raise param_error(
                f"{param}.parameters", f"the schema of tool {self.name!r} is wrong: {wrong[:400]}"
            )

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates read it."""
        described = {} if self.description is None else {"description": self.description}
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}


class Tool(StrictModel):
    """A tool; functions are the only kind."""

    place = "tools[]."
    type: Literal["function"]
    function: ToolFunction


@dataclass(frozen=True)
class ToolChoice:
    """Which tools may or must be called; made by `ToolFields.choice`."""

    mode: Mode
    allowed: tuple[str, ...] | None = None  # None: all
    is_named: bool = False  # exactly one call, of the one allowed


def _named(value: Mapping[str, Any]) -> str | None:
    """Returns the function's name in a choice or in an allowed tool, or None if there is none."""
    inner = value.get("function")
    name = inner.get("name") if isinstance(inner, dict) else value.get("name")
    return name if isinstance(name, str) else None


def _choice(value: str | dict[str, Any]) -> ToolChoice:
    """Returns the choice of a `tool_choice`. Raises PydanticCustomError for an invalid one."""
    modes: dict[str, Mode] = {"auto": "auto", "required": "required", "any": "required", "none": "none"}
    if isinstance(value, str) and value in modes:
        return ToolChoice(modes[value])
    if isinstance(value, dict):
        name = _named(value)
        if value.get("type", "function") == "function" and name is not None:
            return ToolChoice("required", (name,), is_named=True)
        inner = value.get("allowed_tools", value)
        if value.get("type") == "allowed_tools" and isinstance(inner, dict):
            listed = inner.get("tools")
            names = (
                [_named(tool) for tool in listed if isinstance(tool, dict)]
                if isinstance(listed, list)
                else []
            )
            mode = inner.get("mode", "auto")
            if names and None not in names and mode in ("auto", "required"):
                return ToolChoice(modes[mode], tuple(name for name in names if name is not None))
    raise param_error(
        "tool_choice",
        "'tool_choice' is 'auto', 'required', 'none', {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}, "
        f"got {shown(value)}",
    )


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Raises PydanticCustomError for names that other fields set."""
    taken = sorted(_RESERVED_NAMES & set(kwargs))
    if taken:
        raise param_error("chat_template_kwargs", f"'chat_template_kwargs' must not set {taken}")
    return kwargs


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(check_template_kwargs)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ToolFields(StrictModel):
    """The fields of a chat request about tools and reasoning."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="auto, required, none, one function, or allowed_tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    functions: list[ToolFunction] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="As tools, before there were any"
    )
    function_call: str | dict[str, Any] | None = Field(None, description="As tool_choice, with functions")
    reasoning_effort: Effort | None = Field(None, description="How long to think, where the model can choose")
    include_reasoning: bool = Field(True, description="false: the thought is counted, but not sent")
    separate_reasoning: bool = Field(True, description="false: the thought stays in the content, in its tags")
    thinking_token_budget: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Tokens after which the thought is ended"
    )
    chat_template_kwargs: TemplateKwargs | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        listed = self.listed_tools()
        where = "functions[{}]" if self.functions is not None and not self.tools else "tools[{}].function"
        for number, tool in enumerate(listed):
            tool.check(where.format(number))
        names = [tool.name for tool in listed]
        twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
        param = "tools" if self.tools else "functions"
        if twice is not None:
            raise param_error(param, f"two tools have the name {twice!r}")
        if self.tools and self.functions:
            raise param_error("functions", "'tools' and 'functions' exclude one another")
        self._check_choice(names)
        return self

    def _check_choice(self, names: list[str]) -> None:
        param = "tool_choice" if self.tool_choice is not None else "function_call"
        choice = self.choice()
        if choice.mode != "none" and (self.tool_choice or self.function_call) is not None and not names:
            raise param_error(param, f"'{param}' needs 'tools'")
        unknown = next((name for name in choice.allowed or () if name not in names), None)
        if unknown is not None:
            raise param_error(param, f"'{param}' names {unknown!r}, but the tools are {', '.join(names)}")

    def listed_tools(self) -> list[ToolFunction]:
        """Returns the functions, from whichever field has them."""
        return [tool.function for tool in self.tools] if self.tools else list(self.functions or ())

    def choice(self) -> ToolChoice:
        """Returns the tool choice; by default the model decides."""
        asked = self.tool_choice if self.tool_choice is not None else self.function_call
        return ToolChoice("auto") if asked is None else _choice(asked)

    def speaks_functions(self) -> bool:
        """Returns whether the answer has `function_call` instead of `tool_calls`, as `functions` imply."""
        return bool(self.functions)
