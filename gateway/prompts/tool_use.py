"""Converts a chat request's tools and reasoning fields to template variables, parsers and a grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from gateway.constraints.response_format import response_format_constraint
from gateway.constraints.tool_calls import tool_call_constraint
from gateway.generation.model import ServedModel
from gateway.parsers.events import OutputPlan, ToolSpec
from gateway.parsers.json_calls import mistral_id
from gateway.parsers.registry import HARMONY, JSON_LIST, think_format, thought_bounds, tool_format
from gateway.schemas.errors import bad_request
from gateway.schemas.requests import ChatCompletionRequest
from gateway.schemas.structured import NO_STRUCTURE
from gateway.schemas.tools import ToolFunction
from gateway.text.conversation import Conversation
from protos.engine_pb2 import Constraint

_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # names of the same variable in different templates
# The efforts that gpt-oss knows, for those of newer models.
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_HUNYUAN_EFFORTS = {"none": "no_think"}


def conversation_of(body: ChatCompletionRequest, model: ServedModel) -> Conversation:
    """Returns the input of the chat template.

    Raises:
        ApiError: 400; tools were sent, but the template does not support them.
    """
    tools = offered_tools(body)
    template = model.tokenizer.chat_template
    if tools and template is not None and not template.knows_tools:
        raise bad_request(
            f"the chat template of model {model.name!r} does not know tools: without them in its prompt the "
            "model cannot call any (--chat-template FILE gives it another template)",
            "tools" if body.tools else "functions",
            "unsupported_parameter",
        )
    messages = [message.for_template() for message in body.messages]
    if model.reasoning_parser == "gpt_oss":
        for message in messages:  # its template's name, which excludes a thought next to an answer
            if message.get("reasoning_content") and not message["content"]:
                message["thinking"] = message["reasoning_content"]
    if model.tool_parser == "mistral":
        _shorten_ids(messages)
    return Conversation(
        messages,
        body.opens_turn(),
        body.continue_final_message,
        template_variables(body, model),
        [tool.for_template() for tool in tools] or None,
    )


def _shorten_ids(messages: list[dict[str, Any]]) -> None:
    """Replaces ids from other clients or models by ids as Mistral's templates require."""

    def short(call_id: str) -> str:
        return call_id if _MISTRAL_ID.fullmatch(call_id) else mistral_id(call_id)

    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = short(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            call["id"] = short(call["id"])


def offered_tools(body: ChatCompletionRequest) -> list[ToolFunction]:
    """Returns the tools in the prompt: those that may be called."""
    choice, tools = body.choice(), body.listed_tools()
    if choice.mode == "none":
        return []
    return [
        tool for tool in tools if choice.allowed is None or choice.is_named or tool.name in choice.allowed
    ]


def template_variables(body: ChatCompletionRequest, model: ServedModel) -> dict[str, Any]:
    """Returns `chat_template_kwargs`, `documents`, the answer's schema, and `reasoning_effort` by the names
    that the template reads."""
    given = {**(body.chat_template_kwargs or {}), "documents": body.documents}
    template, effort = model.tokenizer.chat_template, body.reasoning_effort
    if template is None:
        return given
    values: dict[str, Any] = {}
    schema = _answer_schema(body)
    if isinstance(schema, dict) and schema != {"type": "object"}:  # which does not constrain the answer
        values["response_format"] = schema
    reads_switch = any(name in template.variables for name in _THINKING_SWITCHES)
    if effort is None and not reads_switch and any(given.get(name) is False for name in _THINKING_SWITCHES):
        effort = "none"  # GLM-5.3's and Hunyuan's templates read the effort alone
    if effort is not None:
        names = _HARMONY_EFFORTS if model.reasoning_parser == "gpt_oss" else {}
        if "no_think" in template.source:
            names = _HUNYUAN_EFFORTS
        values["reasoning_effort"] = names.get(effort, effort)
        # Templates that read both variables follow one of them: one that the request sets stands alone.
        if not any(name in given and name in template.variables for name in _THINKING_SWITCHES):
            values |= dict.fromkeys(_THINKING_SWITCHES, effort != "none")
    return {**{name: value for name, value in values.items() if name in template.variables}, **given}


def output_plan(
    body: ChatCompletionRequest,
    model: ServedModel,
    prompt: str,
    texts: Mapping[str, tuple[str, str]] | None = None,
) -> OutputPlan | None:
    """Returns the parsing of the output; None: everything is content.

    Args:
        body: the request.
        model: the served one.
        prompt: the rendered one, whose end shows whether the model is thinking.
        texts: grammars of tools that take text, by name (`Translation.texts`).
    """
    texts = texts or {}
    choice, tools = body.choice(), offered_tools(body)
    reasoning = model.reasoning_parser if body.separate_reasoning else None
    parser = model.tool_parser if tools else None
    is_forced = bool(tools) and choice.mode == "required"
    if is_forced:
        parser = parser or JSON_LIST
    if reasoning is None and parser is None:
        return None
    is_single = body.parallel_tool_calls is False or choice.is_named or bool(body.functions)
    return OutputPlan(
        reasoning_parser=reasoning,
        tool_parser=parser,
        starts_in_reasoning=reasoning is not None and _thought(body, reasoning, prompt) == "open",
        tools=tuple(_spec(tool, texts.get(tool.name)) for tool in tools),
        forced=is_forced,
        max_calls=1 if is_single else None,
        show_reasoning=body.include_reasoning,
    )


def _spec(tool: ToolFunction, text: tuple[str, str] | None) -> ToolSpec:
    return ToolSpec(tool.name, tool.parameters or {}, bool(tool.strict) or text is not None, text)


def _thought(body: ChatCompletionRequest, parser: str, prompt: str) -> Literal["open", "closed", "unknown"]:
    """Returns whether the prompt opened or closed the thought that the first output token belongs to."""
    think = think_format(parser)
    if think is None:
        return "unknown"  # the format has an opener for every part
    end = prompt.rstrip()
    if not body.opens_turn():
        # The last message is continued: its own text opened the thought, or closed it.
        return "open" if prompt.rfind(think.begin) > prompt.rfind(think.end) else "closed"
    if end.endswith(think.end):
        return "closed"
    opened = end.endswith((think.begin, think.begin + think.label.rstrip()))
    return "open" if think.always or opened else "unknown"


def constraint_of(
    body: ChatCompletionRequest, model: ServedModel, plan: OutputPlan | None, prompt: str
) -> Constraint | None:
    """Returns the grammar of required calls or of the answer, with the bound on the thought; None: neither.

    Raises:
        ApiError: 400 naming the parameter and the keyword of a schema that cannot be enforced.
    """
    wanted = response_format_constraint(body) if body.model_fields_set & NO_STRUCTURE.keys() else None
    calls = _tool_constraint(body, model, plan, wanted)
    constraint = calls or wanted
    budget, parser = body.thinking_token_budget, model.reasoning_parser
    if budget is not None and parser is None:
        raise bad_request(
            f"'thinking_token_budget' needs a model whose thoughts can be recognised; {model.name!r} has no "
            "reasoning parser (reasoning_parser)",
            "thinking_token_budget",
            "unsupported_parameter",
        )
    thought = "closed" if parser is None else _thought(body, parser, prompt)
    think = think_format(parser or "")
    if thought == "unknown" and think is not None and think.begin not in model.tokenizer.added_tokens:
        thought = "closed"  # else a grammar whose calls begin with the same letter would be ambiguous
    if parser is None or thought == "closed" or (constraint is None and budget is None):
        return constraint
    constraint = constraint or Constraint()
    if parser == HARMONY and calls is not None and budget is None and not (plan is not None and plan.forced):
        return constraint  # its messages include thoughts
    calls_only = calls is not None
    bounds = thought_bounds(parser, thought == "open", calls_only, model.tokenizer)
    constraint.after_token_ids.extend(bounds.end)
    constraint.start_token_ids.extend(bounds.begin)
    if budget is not None:
        constraint.max_reasoning_tokens = budget
        constraint.forced_token_ids.extend(bounds.forced)
    return constraint


def _tool_constraint(
    body: ChatCompletionRequest, model: ServedModel, plan: OutputPlan | None, wanted: Constraint | None
) -> Constraint | None:
    """Returns the grammar of required and named calls, or of calls by a strict tool or next to a JSON answer;
    None: the model decides, and its text is free or as `wanted`."""
    if plan is None or plan.tool_parser is None:
        return None
    form = tool_format(plan.tool_parser)
    answer = None if plan.forced else _answer_schema(body)
    is_strict = wanted is None and any(tool.strict for tool in plan.tools)
    if not plan.forced and not is_strict and answer is None:
        return None
    allowed = body.choice().allowed
    return tool_call_constraint(
        form.framing,
        [tool for tool in plan.tools if allowed is None or tool.name in allowed],
        at_least_one=plan.forced,
        parallel=plan.max_calls is None,
        added_tokens=model.tokenizer.added_tokens,
        special_ids=model.tokenizer.special_ids,
        openers=(*form.openers, *form.sections),
        answer_schema=answer,
    )


def _answer_schema(body: ChatCompletionRequest) -> dict[str, Any] | bool | None:
    """Returns the schema of `response_format`, or None if there is none."""
    wanted = body.response_format
    if wanted is None or wanted.type not in ("json_object", "json_schema"):
        return None
    schema = wanted.schema_ if wanted.json_schema is None else wanted.json_schema.schema_
    return {"type": "object"} if schema is None else schema
