"""Builds the `Constraint` for tool calls: the model's own framing, around arguments of their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.constraints.raw_values import ALL_KINDS, allows_strings, check_size, raw_value, valid_words
from gateway.constraints.response_format import check_constraint, json_constraint
from gateway.parsers.events import ToolSpec
from gateway.parsers.framing import ToolFraming
from gateway.parsers.typed_values import kinds_of, referred
from gateway.schemas.errors import ApiError, bad_request
from gateway.schemas.structured import JsonSchema
from moebius.grammar.embedded import text_grammar
from moebius.grammar.lark import ANY_TEXT, GrammarError, LarkGrammar, quoted
from moebius.grammar.regex import ANYTHING, escaped, literal
from protos.engine_pb2 import Constraint


def tool_call_constraint(
    framing: ToolFraming,
    tools: Sequence[ToolSpec],
    *,
    at_least_one: bool,
    parallel: bool,
    added_tokens: Mapping[str, int],
    special_ids: frozenset[int] = frozenset(),
    openers: Sequence[str] = (),
    answer_schema: JsonSchema | None = None,
) -> Constraint:
    """Returns a constraint: calls of `tools`, in the model's format, whose arguments satisfy their schemas.

    Args:
        framing: of the model's tool parser.
        tools: those that may be called; for a named choice only that one. Calls of those that are not strict
            may have any arguments, unless only calls are allowed.
        at_least_one: the output consists of calls; else text may come before the calls, or instead.
        parallel: whether more than one call may be made.
        added_tokens: ids of the tokenizer's added tokens by their text (`Tokenizer.added_tokens`).
        special_ids: those of them that no text spells (`Tokenizer.special_ids`).
        openers: texts that the parser reads as a call's beginning.
        answer_schema: instead of calls, JSON of this schema is allowed, and no other text.

    The caller sets `after_token_ids` and the related fields if the model thinks first.

    Raises:
        ApiError: 400 naming the tool and the keyword of its schema that cannot be enforced.
    """
    if not tools:
        raise bad_request("there is no tool that could be called", "tools")
    calls = _Calls(framing, LarkGrammar(added_tokens), special_ids, openers, at_least_one)
    for number, tool in enumerate(tools):
        if calls.holds_to_schema(tool):
            _check_parameters(tool, f"tools[{number}].function.parameters")
    lark = calls.grammar(tools, at_least_one, parallel, answer_schema)
    constraint = Constraint(lark=lark)
    check_constraint(constraint, "tools")
    return constraint


def _check_parameters(tool: ToolSpec, param: str) -> None:
    """Checks the schema alone, so that the error names the tool."""
    try:
        check_constraint(json_constraint(_object_schema(tool)), param)
    except ApiError as error:
        raise bad_request(f"tool {tool.name!r}: {error.message}", param) from None


def _object_schema(tool: ToolSpec) -> dict[str, Any]:
    return {"type": "object", **tool.parameters}


_ANY_NAME = "/[A-Za-z0-9_.$-]{1,128}/"  # of a parameter
_INPUT = "input"  # the parameter of a tool that takes text
_FREE_OBJECT: dict[str, Any] = {"type": "object"}
# Keywords of the arguments' object that a framing with separate parameters cannot enforce.
_OF_OBJECTS = (
    "not", "if", "minProperties", "maxProperties", "patternProperties", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "enum", "const",
)  # fmt: skip


_MAX_FORMS = 256  # of the arguments' object


class _Calls:
    """Builds the grammar of calls in one framing."""

    def __init__(
        self,
        framing: ToolFraming,
        grammar: LarkGrammar,
        special_ids: frozenset[int],
        openers: Sequence[str],
        holds_all: bool,
    ) -> None:
        self._framing = framing
        self._lark = grammar
        self._special = special_ids
        self._openers = openers
        self._holds_all = holds_all
        # Texts that end a value or its call for the parser, in any spelling.
        ends = [grammar.added_pieces(text) for text in (framing.call_end, framing.end)]
        close = framing.quote or framing.parameter_end.partition("{name}")[0].strip()
        self._not_in_text = [*dict.fromkeys([*([close] if close else []), *ends[0], *ends[1]])]

    def holds_to_schema(self, tool: ToolSpec) -> bool:
        """Returns whether the arguments must satisfy the tool's schema; otherwise any are allowed."""
        return tool.text is None and (tool.strict or self._holds_all)

    def grammar(
        self, tools: Sequence[ToolSpec], at_least_one: bool, parallel: bool, answer: JsonSchema | None
    ) -> str:
        """Returns Lark's text: of calls, of text and calls, or of calls or a JSON answer."""
        framing, lark = self._framing, self._lark
        if framing.place == "channels" and not at_least_one:
            return lark.render(self._channels(tools, answer))
        call = lark.any_of([self._call(tool) for tool in tools])
        may_go_on = parallel and framing.place != "channels"  # channels: the model stops after a call
        more = f"({lark.literal(framing.separator)} {call})*" if may_go_on else ""
        calls = lark.rule(f"{lark.literal(framing.begin)} {call} {more} {lark.literal(framing.end)}")
        if at_least_one:
            return lark.render(calls)
        if answer is not None:
            return lark.render(f"{calls} | {lark.json(answer)}")
        if framing.place == "bare":
            return lark.render(self._bare(calls))
        # Text that may contain calls: whatever begins like a call is one.
        marker = lark.first_piece((framing.begin or framing.call_begin).split("{name}")[0], self._special)
        if framing.begin:
            first = f"{lark.literal(framing.begin[len(marker) :])} {call}"
        else:
            first = lark.any_of([self._call(tool, len(marker)) for tool in tools])
        calls = lark.rule(f"{first} {more} {lark.literal(framing.end)}")
        prefix, token = lark.split_at(marker, self._special)
        if prefix and token:  # one rule for both: the lexer would read all of it as continuing text
            return lark.render(f"{_pieces(prefix)} ({quoted(prefix)} {lark.literal(token)} {calls})?")
        spelled = [text for text in self._openers if not self._is_token(text)]
        before = self._up_to(None, marker, [text for text in spelled if text != marker])
        free = self._text([*spelled, *([] if self._is_token(marker) else [marker])])
        return lark.render(f"{before} {calls} | {free}")

    def _is_token(self, text: str) -> bool:
        """Returns whether part of the text is a token that no text spells."""
        return self._lark.split_at(text, self._special)[1] != ""

    def _text(self, without: Sequence[str]) -> str:
        """Returns a rule for any text that contains none of `without`."""
        if not without:
            return self._lark.rule(ANY_TEXT)
        return self._lark.rule(f"{self._lark.terminal(f'{literal(ANYTHING)} & {_lacks(without)}')}")

    def _up_to(self, body: str | None, end: str, without: Sequence[str]) -> str:
        """Returns a rule for text followed by `end`, which the text does not contain.

        Args:
            body: a terminal's body; None: any text.
            without: further substrings that are excluded.
        """
        lark = self._lark
        prefix, token = lark.split_at(end, self._special)
        if not token:
            text = f"({body or literal(ANYTHING)}) & {_lacks([end, *without])}"
            return lark.rule(lark.terminal(f"({text}) {quoted(end)}"))
        if not prefix:
            free = body or literal(ANYTHING)
            inner = lark.terminal(f"({free}) & {_lacks(without)}" if without else free)
            return lark.rule(f"{inner} {lark.literal(token)}")
        if body is not None or without:
            text = f"({body or literal(ANYTHING)}) & {_lacks([prefix, *without])}"
            return lark.rule(f"{lark.terminal(f'({text}) {quoted(prefix)}')} {lark.literal(token)}")
        return lark.rule(f"{_pieces(prefix)} {quoted(prefix)} {lark.literal(token)}")

    def _bare(self, calls: str) -> str:
        """Returns the start rule's body for output that is calls if it begins like them."""
        framing, lark = self._framing, self._lark
        first = (framing.begin or framing.call_begin).split("{name}")[0][:1]
        text = literal(r"\s*([^\s" + escaped(first) + "](?s:.*))?")
        if not framing.marker:
            return f"{calls} | {lark.terminal(text)}"
        if not self._is_token(framing.marker):
            return f"{calls} | {lark.terminal(f'{text} & {_lacks([framing.marker])}')}"
        plain = lark.terminal(text)
        return f"{calls} | {plain} | {plain} {lark.literal(framing.marker)} {calls}"

    def _channels(self, tools: Sequence[ToolSpec], answer: JsonSchema | None) -> str:
        """Returns the start rule's body for harmony's messages up to the first call or the answer."""
        lark = self._lark
        silent = " | ".join(
            lark.literal(f"<|channel|>{name}<|message|>") for name in ("analysis", "commentary")
        )
        before = lark.rule(
            f"({silent}) {self._up_to(None, '<|end|>', ())} {lark.literal('<|start|>assistant')}"
        )
        body = lark.json(answer) if answer is not None else ANY_TEXT
        final = lark.rule(f"{lark.literal('<|channel|>final<|message|>')} {body}")
        return f"{before}* {lark.any_of([final, *map(self._call, tools)])}"

    def _call(self, tool: ToolSpec, skipped: int = 0) -> str:
        """Returns a rule for a call; `skipped`: characters of its beginning that were matched already."""
        begin, end = self._framing.call_begin[skipped:].replace("{name}", tool.name), self._framing.call_end
        end = self._indexed(end)
        if self._framing.place == "channels":  # a call's end also ends the output, and need not be generated
            end = f"({end})?"
        return self._lark.rule(f"{self._indexed(begin)} {self._arguments(tool)} {end}")

    def _indexed(self, text: str) -> str:
        return " /[0-9]{1,3}/ ".join(self._lark.literal(part) for part in text.split("{index}"))

    def _arguments(self, tool: ToolSpec) -> str:
        is_json = self._framing.arguments == "json"
        try:
            if tool.text is not None:
                return self._text_argument(*tool.text)
            if not self.holds_to_schema(tool):
                return self._lark.json(_FREE_OBJECT) if is_json else self._free_parameters()
            schema = _object_schema(tool)
            return self._lark.json(schema) if is_json else self._parameters(schema, schema)
        except GrammarError as error:
            what = "the grammar of its text" if tool.text is not None else "its schema"
            raise bad_request(
                f"tool {tool.name!r}: {what} cannot be enforced as this model writes calls: {error}", "tools"
            ) from None

    def _text_argument(self, syntax: str, definition: str) -> str:
        """Returns a rule for the one parameter of a tool that takes text of a grammar."""
        framing, lark = self._framing, self._lark
        if framing.arguments == "json":
            begin, end = f'{{{quoted(_INPUT)}: "', '"}'
        else:
            begin, end = self._begin_of(_INPUT, True), self._end_of(_INPUT, True)
            begin, end = (begin, end) if framing.values == "raw" else (f'{begin}"', f'"{end}')
        if framing.arguments == "json" or framing.values != "raw":
            return lark.rule(
                f"{lark.literal(begin)} {lark.rule(text_grammar(syntax, definition))} {lark.literal(end)}"
            )
        prefix, token = lark.split_at(end, self._special)
        not_in_text = [*self._not_in_text, *([prefix] if token and prefix else [])]
        text = lark.rule(text_grammar(syntax, definition, prefix, not_in_text))
        return lark.rule(f"{lark.literal(begin)} {text} {lark.literal(token)}")

    def _free_parameters(self) -> str:
        """Returns a rule for any parameters, with any values."""
        framing, lark = self._framing, self._lark
        before, _, after = framing.parameter_begin.partition("{name}")
        if framing.quote:
            end = framing.quote
            text = f"{lark.literal(end)} {self._up_to(None, end, self._other_ends(end))}"
            others = lark.json({"type": ["array", "boolean", "null", "number", "object"]})
            value = f"{lark.any_of([text, others])} {lark.literal(framing.parameter_end)}"
            name = f"{_ANY_NAME} {lark.literal(after)}"
        elif framing.values == "raw":
            # An end with the name is recognised by its beginning alone, and may have any name.
            end, named, rest = framing.parameter_end.partition("{name}")
            value = self._up_to(None, end, self._other_ends(end))
            if named:
                value = f"{value} {_ANY_NAME} {lark.literal(rest)}"
            afters = [lark.literal(after.replace("{string}", word)) for word in ("true", "false")]
            name = f"{_ANY_NAME} {lark.any_of([*dict.fromkeys(afters)])}"
        else:
            value = f"{lark.any_of([lark.json({}), *map(quoted, ('True', 'False', 'None'))])}"
            value = f"{value} {lark.literal(framing.parameter_end)}"
            name = f"/[A-Za-z_][A-Za-z0-9_]{{0,127}}/ {lark.literal(after)}"
        one = lark.rule(f"{lark.literal(before)} {name} {value}")
        return lark.rule(f"({one} ({lark.literal(framing.parameter_separator)} {one})*)?")

    def _other_ends(self, end: str) -> list[str]:
        """Returns further texts that the parser reads as a value's end."""
        prefix, token = self._lark.split_at(end, self._special)
        return [] if token and prefix else [text for text in self._not_in_text if not self._is_token(text)]

    def _parameters(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Returns a rule for the parameters in the schema's order, built from the last one on."""
        lark = self._lark
        forms = _object_forms(schema, root)
        if len(forms) > 1:
            return lark.any_of([self._parameters(form, root) for form in forms])
        (form,) = forms
        required = form["required"]
        separator = lark.literal(self._framing.parameter_separator)
        # The rules for what follows if nothing has been written yet, and if something has.
        fresh = later = lark.rule("")
        for name in reversed(list(form["properties"])):
            one = self._parameter(name, form["properties"][name], root)
            left_out = [] if name in required else [fresh]
            fresh, later = (
                lark.any_of([f"{one} {later}", *left_out]),
                lark.any_of([f"{separator} {one} {later}", *([] if name in required else [later])]),
            )
        return fresh

    def _begin_of(self, name: str, is_string: bool) -> str:
        begin = self._framing.parameter_begin.replace("{name}", name)
        begin = begin.replace("{string}", "true" if is_string else "false")
        return begin + (self._framing.quote if is_string else "")

    def _end_of(self, name: str, is_string: bool) -> str:
        end = self._framing.parameter_end.replace("{name}", name)
        return (self._framing.quote if is_string else "") + end

    def _parameter(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        framing, lark = self._framing, self._lark
        check_size(schema, root)
        end = self._end_of(name, False)
        definitions: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
        described = {**definitions, **schema} if isinstance(schema, dict) else schema
        begin = lark.literal(self._begin_of(name, False))
        if framing.values == "raw" and allows_strings(schema, root):
            return self._raw(name, described, root)
        if framing.values == "python":
            return lark.rule(f"{begin} {self._python(described, root)} {lark.literal(end)}")
        return lark.rule(f"{begin} {lark.json(described)} {lark.literal(end)}")

    def _python(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Returns a rule for a value as a Python literal: JSON, except for three words."""
        kinds = kinds_of(schema, root) or ALL_KINDS
        ways = [quoted(_PYTHON_WORDS[word]) for word in valid_words(schema, root, kinds)]
        others = sorted(kinds - {"boolean", "null"} - ({"integer"} if "number" in kinds else set()))
        if others:
            ways.append(self._lark.json({**(schema if isinstance(schema, dict) else {}), "type": others}))
        return self._lark.any_of(ways)

    def _raw(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Returns a rule for a parameter that may be an unquoted string, with all its spellings."""
        framing, lark = self._framing, self._lark
        has_kind = bool(framing.quote) or "{string}" in framing.parameter_begin
        end, plain_end = self._end_of(name, True), self._end_of(name, False)
        others = self._other_ends(end)
        value = raw_value(schema, root, has_kind, others)
        as_text, as_json = (lark.literal(self._begin_of(name, is_string)) for is_string in (True, False))
        ways = [f"{as_text} {self._up_to(value.strings, end, others if value.strings is None else ())}"]
        prefix, token = lark.split_at(plain_end, self._special)
        for word in value.words:
            text = f"{quoted(word)} {quoted(prefix)}" if prefix else quoted(word)
            ways.append(f"{as_json} {lark.terminal(text)} {lark.literal(token)}")
        if value.others:
            kinds = (
                {**schema, "type": list(value.others)}
                if isinstance(schema, dict)
                else {"type": [*value.others]}
            )
            ways.append(f"{as_json} {lark.json(kinds)} {lark.literal(plain_end)}")
        return lark.any_of(ways)


def _pieces(prefix: str) -> str:
    """Returns a rule for any text with `prefix` as one piece: its token may begin a marker."""
    pieces = [f"/[^{escaped(prefix[0])}]+/", *dict.fromkeys((quoted(prefix[0]), quoted(prefix)))]
    return f"({' | '.join(pieces)})*"


def _lacks(texts: Sequence[str]) -> str:
    """Returns a condition for terminals: none of the texts occurs."""
    found = "|".join(map(escaped, dict.fromkeys(texts)))
    return f"~{literal(f'{ANYTHING}(?:{found}){ANYTHING}')}"


def _object_forms(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 8) -> list[dict[str, Any]]:
    """Returns the alternative sets of properties of arguments.

    Raises:
        GrammarError: naming a keyword about the object as a whole.
    """
    if depth == 0:
        raise GrammarError("references and combinations of more than 8 levels")
    wrong = next((key for key in _OF_OBJECTS if key in schema), None)
    if wrong is not None:
        raise GrammarError(f"keywords that are not supported: {wrong} (at the top)")
    required = list(schema.get("required") or ())
    others = schema.get("additionalProperties", True)
    properties = dict.fromkeys(required, others) | dict(schema.get("properties") or {})
    listed = {name: part for name, part in properties.items() if part is not False}
    forms = [{"properties": listed, "required": required}]
    groups = [[part] for part in schema.get("allOf") or ()]
    groups += [[referred(str(schema["$ref"]), root)]] if "$ref" in schema else []
    groups += [list(schema[name]) for name in ("anyOf", "oneOf") if schema.get(name)]
    for group in groups:
        inner = [
            form
            for part in group
            if isinstance(part, Mapping)
            for form in _object_forms(part, root, depth - 1)
        ]
        if len(forms) * len(inner) > _MAX_FORMS:
            raise GrammarError(f"combinations of more than {_MAX_FORMS} sets of properties")
        forms = [_merged(one, other) for one in forms for other in inner]
    return forms


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    properties = dict(one["properties"])
    for name, part in other["properties"].items():
        known = properties.get(name, True)
        properties[name] = part if known is True else known if part is True else {"allOf": [known, part]}
    return {"properties": properties, "required": [*one["required"], *other["required"]]}


_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
