"""Reads tool calls whose arguments are texts between tags: they become JSON as they arrive."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import fields, replace
from typing import Any

import structlog

from gateway.parsers.framing import ToolFraming
from gateway.parsers.json_reader import MAX_LABEL, JsonStrings
from gateway.parsers.machine import Reading, ToolFormat
from gateway.parsers.scanner import END, Steps
from gateway.parsers.typed_values import ValueWriter, kinds_of_property

logger = structlog.get_logger(__name__)
_ATTRIBUTE = re.compile(r'([\w-]+)\s*=\s*"([^"]*)"')


class TaggedCalls(ToolFormat):
    """Reads a call that is an element with its name in the opening tag, and one element per argument."""

    parameter_open: str
    parameter_close = "</parameter>"
    call_close: str
    tag_end = ">"
    trim = False  # a line break after an opening and before a closing tag is not part of the value

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._tag_end = self.markers(self.tag_end)
        self._body = self.markers(self.parameter_open, self.call_close, *self.closers, *self.openers)
        # A value may contain any text; tokens of the format are certain.
        ends = [text for text in (*self.closers, self.call_close) if text in self.tokens]
        self._value_end = self.markers(self.parameter_close, *ends)

    def read(self, opener: str) -> Steps[bool]:
        """Reads calls after the beginning of the opening tag."""
        name = yield from self.read_name()
        if not name or (opener not in self.tokens and not self.after_section and name not in self.tools):
            return False
        while name and not self.sink.is_full:
            self.sink.start_call(name, self.new_id())
            self.scan.forget()  # from here on it is a call
            follows = yield from self._arguments(name)
            if not follows:
                break
            name = yield from self.read_name()  # the next call, without the end of this one
        return True

    def read_name(self) -> Steps[str]:
        """Returns the tool's name, or an empty string if there is none."""
        head, marker = yield from self.scan.collect(self._tag_end, MAX_LABEL)
        return attributes(head).get("name", "") if marker == self.tag_end else ""

    def read_parameter(self) -> Steps[dict[str, str]]:
        """Returns an argument's name and further attributes; empty: there is none."""
        head, marker = yield from self.scan.collect(self._tag_end, MAX_LABEL)
        return attributes(head) if marker == self.tag_end else {}

    def _arguments(self, name: str) -> Steps[bool]:
        """Emits a call's arguments; returns whether another call follows without the end of this one."""
        is_first = True
        while True:
            piece, marker = yield from self.scan.until(self._body)
            if piece.strip():
                logger.debug("text between arguments", format=type(self).__name__, text=piece[:200])
            if marker == END:
                return False
            if marker == self.parameter_open:
                said = yield from self.read_parameter()
                if "name" not in said:
                    continue
                key = json.dumps(said["name"], ensure_ascii=False)
                self.sink.arguments(f"{'{' if is_first else ', '}{key}: ")
                is_first = False
                marker = yield from self._value(self._kinds(name, said), self._has_grammar(name))
                if marker == END:
                    return False
            if marker in (self.call_close, *self.closers, *self.openers):
                self.sink.arguments("{}" if is_first else "}")
                self.sink.end_call()
                return marker in self.openers

    def _kinds(self, tool: str, said: dict[str, str]) -> frozenset[str]:
        """Returns the types that an argument may have."""
        root = self.tools[tool].parameters if tool in self.tools else {}
        kinds = kinds_of_property(said["name"], root)
        if "string" in said:
            return frozenset(("string",)) if said["string"] != "false" else kinds - {"string"}
        return kinds

    def _has_grammar(self, tool: str) -> bool:
        """Returns whether a grammar forces the arguments: values other than strings are then valid JSON."""
        return self.is_forced or (tool in self.tools and self.tools[tool].strict)

    def _value(self, kinds: frozenset[str], has_grammar: bool) -> Steps[str | None]:
        """Emits a value; returns the marker after it. Within JSON's own strings a marker is text."""
        writer = ValueWriter(kinds, self.trim)
        strings = JsonStrings() if has_grammar and kinds and "string" not in kinds else None
        while True:
            piece, marker = yield from self.scan.until(self._value_end)
            if strings is not None:
                strings.feed(piece)
                if strings.is_open and marker == self.parameter_close:
                    piece, marker = piece + marker, None
            text = writer.feed(piece)
            if text:
                self.sink.arguments(text)
            if marker == END:
                return END
            if marker is not None:
                self.sink.arguments(writer.finish())
                return marker


def attributes(head: str) -> dict[str, str]:
    """Returns the attributes of a tag; a plain text is the name."""
    found = dict(_ATTRIBUTE.findall(head))
    bare = head.strip().strip("\"'")
    return found if found or not bare or "\n" in bare or "<" in bare else {"name": bare}


class Qwen3Coder(TaggedCalls):
    """Qwen3-Coder and Qwen3.5: `<function=…>` in `<tool_call>`, which the model sometimes leaves out."""

    framing = ToolFraming(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        separator="\n",
        arguments="parameters",
        parameter_begin="<parameter={name}>\n",
        parameter_end="\n</parameter>\n",
    )
    openers = ("<function=",)
    sections = ("<tool_call>",)
    closers = ("</tool_call>",)
    parameter_open = "<parameter="
    call_close = "</function>"
    trim = True


class Step3p5(Qwen3Coder):
    """Step 3.5: Qwen3-Coder's format."""


class MinimaxM2(TaggedCalls):
    """MiniMax M2: several `<invoke>` in one element."""

    framing = ToolFraming(
        '<invoke name="{name}">\n',
        "</invoke>\n",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        arguments="parameters",
        parameter_begin='<parameter name="{name}">',
        parameter_end="</parameter>\n",
    )
    openers = ("<invoke",)
    sections = ("<minimax:tool_call>",)
    closers = ("</minimax:tool_call>",)
    parameter_open = "<parameter"
    call_close = "</invoke>"


class DeepseekV32(TaggedCalls):
    """DeepSeek V3.2: MiniMax's format with a token in every tag; an attribute marks string values."""

    framing = ToolFraming(
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>\n",
        begin="<｜DSML｜function_calls>\n",
        end="</｜DSML｜function_calls>",
        arguments="parameters",
        parameter_begin='<｜DSML｜parameter name="{name}" string="{string}">',
        parameter_end="</｜DSML｜parameter>\n",
    )
    openers = ("<｜DSML｜invoke",)
    sections = ("<｜DSML｜function_calls>",)
    closers = ("</｜DSML｜function_calls>",)
    inner = ("｜DSML｜",)
    parameter_open = "<｜DSML｜parameter"
    parameter_close = "</｜DSML｜parameter>"
    call_close = "</｜DSML｜invoke>"


class DeepseekV4(DeepseekV32):
    """DeepSeek V4: V3.2's format with another name for the element around the calls."""

    framing = replace(DeepseekV32.framing, begin="<｜DSML｜tool_calls>\n", end="</｜DSML｜tool_calls>")
    sections = ("<｜DSML｜tool_calls>",)
    closers = ("</｜DSML｜tool_calls>",)


class KeyedCalls(TaggedCalls):
    """Reads calls of a name followed by elements for keys and values."""

    key_close = "</arg_key>"
    value_open = "<arg_value>"
    parameter_open = "<arg_key>"
    parameter_close = "</arg_value>"
    call_close = "</tool_call>"
    separator = ""  # after the name

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._key_end = self.markers(self.key_close, self.call_close)
        self._value_begin = self.markers(self.value_open, self.call_close)

    @classmethod
    def texts(cls) -> frozenset[str]:
        """Returns all texts, with the tags of keys and values."""
        tags = cls.key_close, cls.value_open, cls.parameter_open, cls.parameter_close, cls.separator
        return super().texts() | frozenset(filter(None, tags))

    def read_name(self) -> Steps[str]:
        """Returns the name before a line break, a tag or the end; takes the separator."""
        name = (yield from self.scan.collect_while(_up_to_tag, MAX_LABEL, self.tokens)).strip()
        first = yield from self.scan.peek()
        if self.separator:
            yield from self.scan.accept(self.separator)
        return name if first in ("\n", "<", END) and " " not in name else ""

    def read_parameter(self) -> Steps[dict[str, str]]:
        """Returns the key, up to where its value begins."""
        key, marker = yield from self.scan.collect(self._key_end, MAX_LABEL)
        if marker != self.key_close:
            return {}
        gap, marker = yield from self.scan.collect(self._value_begin, MAX_LABEL)
        return {} if marker != self.value_open or gap.strip() else {"name": key.strip()}


def _up_to_tag(text: str, start: int, limit: int) -> tuple[int, bool]:
    match = _TAG_OR_LINE.search(text, start, limit)
    return (limit, False) if match is None else (match.start(), True)


_TAG_OR_LINE = re.compile(r"[<\n]")


class Glm45(KeyedCalls):
    """GLM 4.5 and 4.6: a name, then keys and values on lines of their own."""

    framing = ToolFraming(
        "<tool_call>{name}\n",
        "</tool_call>",
        separator="\n",
        arguments="parameters",
        parameter_begin="<arg_key>{name}</arg_key>\n<arg_value>",
        parameter_end="</arg_value>\n",
    )
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)


class Glm47(Glm45):
    """GLM 4.7 and 5: GLM 4.5's format without line breaks."""

    framing = ToolFraming(
        "<tool_call>{name}",
        "</tool_call>",
        arguments="parameters",
        parameter_begin="<arg_key>{name}</arg_key><arg_value>",
        parameter_end="</arg_value>",
    )


class LongcatKeys(KeyedCalls):
    """LongCat's later releases: GLM 4.5's format with their own tags."""

    framing = ToolFraming(
        "<longcat_tool_call>{name}\n",
        "</longcat_tool_call>",
        separator="\n",
        arguments="parameters",
        parameter_begin="<longcat_arg_key>{name}</longcat_arg_key>\n<longcat_arg_value>",
        parameter_end="</longcat_arg_value>\n",
    )
    openers = ("<longcat_tool_call>",)
    closers = ("</longcat_tool_call>",)
    key_close = "</longcat_arg_key>"
    value_open = "<longcat_arg_value>"
    parameter_open = "<longcat_arg_key>"
    parameter_close = "</longcat_arg_value>"
    call_close = "</longcat_tool_call>"


class HyV3(KeyedCalls):
    """Hunyuan 3: several calls in one element, with a token after each name."""

    framing = ToolFraming(
        "<tool_call>{name}<tool_sep>\n",
        "</tool_call>\n",
        begin="<tool_calls>\n",
        end="</tool_calls>",
        arguments="parameters",
        parameter_begin="<arg_key>{name}</arg_key>\n<arg_value>",
        parameter_end="</arg_value>\n",
    )
    openers = ("<tool_call>",)
    sections = ("<tool_calls>",)
    closers = ("</tool_call>", "</tool_calls>")
    separator = "<tool_sep>"


class HyV4(KeyedCalls):
    """Hy4: Hunyuan 3's format without that token, and nothing between the tags."""

    framing = ToolFraming(
        "<tool_call>{name}",
        "</tool_call>",
        begin="<tool_calls>",
        end="</tool_calls>",
        arguments="parameters",
        parameter_begin="<arg_key>{name}</arg_key><arg_value>",
        parameter_end="</arg_value>",
    )
    openers = ("<tool_call>",)
    sections = ("<tool_calls>",)
    closers = ("</tool_call>", "</tool_calls>")


def with_tag_suffix(text: str, suffix: str) -> str:
    """Returns the text with `:suffix` in each of its tags, `<name>` and `</name>`."""
    return _TAG.sub(rf"\1:{suffix}>", text)


_TAG = re.compile(r"(</?\w+)>")


@functools.cache
def suffixed(form: type[KeyedCalls], suffix: str) -> type[KeyedCalls]:
    """Returns the format with `:suffix` in the names of all its tags, as checkpoints of Hunyuan have them.

    The suffix differs from one checkpoint to the next, `opensource` in Hy3's and a hash in Hy4's.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return with_tag_suffix(value, suffix)
        return tuple(with_tag_suffix(text, suffix) for text in value) if isinstance(value, tuple) else value

    framing = replace(
        form.framing, **{f.name: changed(getattr(form.framing, f.name)) for f in fields(ToolFraming)}
    )
    texts = {name: changed(getattr(form, name)) for name in _TEXTS}
    return type(f"{form.__name__}_{suffix}", (form,), {"framing": framing, "__doc__": form.__doc__, **texts})


# The attributes of a keyed format that hold its tags.
_TEXTS = (
    *("openers", "sections", "closers", "inner", "separator"),
    *("key_close", "value_open", "parameter_open", "parameter_close", "call_close"),
)
