"""Reads tool calls whose arguments are JSON: they pass through as they are generated."""

from __future__ import annotations

import hashlib
import re

from gateway.parsers.framing import ToolFraming
from gateway.parsers.json_reader import MAX_LABEL, pass_value, read_label
from gateway.parsers.machine import ToolFormat
from gateway.parsers.scanner import END, Markers, Steps, run_of
from gateway.parsers.sink import new_call_id

_NAME = ("name",)
_ARGUMENTS = ("arguments", "parameters")
_OTHER = ("type", "id", "function", "call_id")  # of calls as APIs write them


class NamedObject(ToolFormat):
    """Reads calls that are one object with name and arguments, in any order."""

    framing = ToolFraming('{"name": "{name}", "arguments": ', "}")

    def object(self) -> Steps[bool]:
        """Reads the object, whose `{` is not taken yet; returns False if it is no call."""
        if not (yield from self.scan.accept("{")):
            return False
        name: str | None = None
        early: list[str] = []  # arguments that came before the name
        while True:
            first = yield from self.scan.skip_space()
            if first == ",":
                yield from self.scan.accept(",")
                continue
            if first == "}":
                yield from self.scan.accept("}")
                return self._whole(name, early)
            key = yield from read_label(self.scan, self.tokens)
            if key is None or (yield from self.scan.skip_space()) != ":":
                return (yield from self._cut_off(name))
            yield from self.scan.accept(":")
            first = yield from self.scan.skip_space()
            if key in _NAME:
                name = yield from read_label(self.scan, self.tokens)
                if not name:
                    return False
            elif key in _ARGUMENTS and name is not None and not early:
                if not (yield from self.call_with_json(name, ends=(*self.closers, "}"))):
                    return False
                return (yield from self._rest())
            elif key in _ARGUMENTS or key in _OTHER:
                early = [] if key in _ARGUMENTS else early
                keep = early.append if key in _ARGUMENTS else (lambda _piece: None)
                if not (yield from pass_value(self.scan, keep, self.tokens)):
                    return (yield from self._cut_off(name))
            else:
                return False

    def _rest(self) -> Steps[bool]:
        """Skips the object's entries after the arguments; returns True."""
        while not self.sink.is_full:
            first = yield from self.scan.skip_space()
            if first != ",":
                yield from self.scan.accept("}")
                return True
            yield from self.scan.accept(",")
            yield from self.scan.skip_space()
            yield from read_label(self.scan, self.tokens)
            yield from self.scan.skip_space()
            if not (yield from self.scan.accept(":")):
                return True
            yield from self.scan.skip_space()
            yield from pass_value(self.scan, lambda _piece: None, self.tokens)
        return True

    def _whole(self, name: str | None, arguments: list[str]) -> bool:
        """Emits the call of a complete object whose arguments were held back; False: it is no call."""
        text = "".join(arguments) or "{}"
        if name is None or not text.startswith("{"):
            return False
        self.sink.start_call(name, self.new_id())
        self.sink.arguments(text)
        self.sink.end_call()
        return True

    def _cut_off(self, name: str | None) -> Steps[bool]:
        """Returns whether an object that breaks off is a call: it is when the output ends there."""
        if name is None or (yield from self.scan.peek()) != END:
            return False
        self.sink.start_call(name, self.new_id())
        return True


class Hermes(NamedObject):
    """Hermes, Qwen 2.5 and 3, and many derived models: an object in tags."""

    framing = ToolFraming('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", separator="\n")
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def read(self, opener: str) -> Steps[bool]:
        """Reads calls after the opening tag; some models write several objects in one pair."""
        yield from self.scan.skip_space()
        if not (yield from self.object()):
            return False
        while not self.sink.is_full and (yield from self.scan.skip_space()) == "{":
            if not (yield from self.object()):
                break
        return True


class MinimaxM1(Hermes):
    """MiniMax-M1: one object per line, all in one pair of tags."""

    framing = ToolFraming(
        '{"name": "{name}", "arguments": ', "}", begin="<tool_calls>\n", separator="\n", end="\n</tool_calls>"
    )
    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)


class LlamaJson(NamedObject):
    """Llama 3.1 and later: bare objects with `parameters`, separated by semicolons."""

    framing = ToolFraming(
        '{"name": "{name}", "parameters": ', "}", separator="; ", place="bare", marker="<|python_tag|>"
    )
    openers = ("<|python_tag|>",)
    bare = "{"

    def read(self, opener: str) -> Steps[bool]:
        """Reads calls at the beginning of the answer, or after the tag."""
        yield from self.scan.skip_space()
        if not (yield from self.object()):
            return False
        while not self.sink.is_full:
            if (yield from self.scan.skip_space()) == ";":
                yield from self.scan.accept(";")
            if (yield from self.scan.skip_space()) != "{":
                break
            if not (yield from self.object()):
                break
        return True


class JsonList(NamedObject):
    """A list of objects: the format that is forced on models whose own format is unknown."""

    framing = ToolFraming(
        '{"name": "{name}", "parameters": ', "}", begin="[", separator=", ", end="]", place="bare"
    )
    bare = "["

    def read(self, opener: str) -> Steps[bool]:
        """Reads a list from its beginning."""
        yield from self.scan.skip_space()
        if not (yield from self.scan.accept("[")):
            return False
        return (yield from self.objects())

    def objects(self) -> Steps[bool]:
        """Reads a list's objects, after its beginning; returns False if the first is no call."""
        calls = self.sink.calls
        while not self.sink.is_full:
            first = yield from self.scan.skip_space()
            if first == "{":
                if not (yield from self.object()):
                    break
            elif first == ",":
                yield from self.scan.accept(",")
            else:
                yield from self.scan.accept("]")
                break
        return self.sink.calls > calls


class Granite(JsonList):
    """Granite 3: a list of objects after a token, or after a tag that is not a token."""

    framing = ToolFraming(
        '{"name": "{name}", "arguments": ', "}", begin="<|tool_call|>[", separator=", ", end="]"
    )
    openers = ("<|tool_call|>", "<tool_call>")
    bare = ""


class Jamba(JsonList):
    """Jamba 1.5 and later: a list of objects in tags."""

    framing = ToolFraming(
        '{"name": "{name}", "arguments": ', "}", begin="<tool_calls>[", separator=", ", end="]</tool_calls>"
    )
    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)
    bare = ""


class HunyuanA13b(Jamba):
    """Hunyuan-A13B: Jamba's format."""


class Longcat(Hermes):
    """LongCat-Flash: Hermes's format with its own tags."""

    framing = ToolFraming(
        '<longcat_tool_call>\n{"name": "{name}", "arguments": ', "}\n</longcat_tool_call>", separator="\n"
    )
    openers = ("<longcat_tool_call>",)
    closers = ("</longcat_tool_call>",)


_UP_TO_BRACKET = run_of(re.compile(r"[^\[{]*"))


def mistral_id(seed: str) -> str:
    """Returns an id as Mistral's templates require: nine letters and digits, determined by `seed`."""
    return hashlib.sha256(seed.encode()).hexdigest()[:9]


class Mistral(JsonList):
    """Mistral: a token, then a list of objects or, since 2025, name and arguments around a token."""

    framing = ToolFraming("[TOOL_CALLS]{name}[ARGS]", "")
    openers = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")
    bare = ""

    def new_id(self) -> str:
        """Returns nine letters and digits."""
        return mistral_id(new_call_id())

    def read(self, opener: str) -> Steps[bool]:
        """Reads calls after the token."""
        first = yield from self.scan.skip_space()
        if first == "[" and (yield from self.scan.accept("[")):
            return (yield from self.objects())
        if first == "{":
            return (yield from self.object())
        name, call_id = (yield from self.scan.collect_while(_UP_TO_BRACKET, MAX_LABEL)).strip(), ""
        if (yield from self.scan.accept("[CALL_ID]")):
            call_id = (yield from self.scan.collect_while(_UP_TO_BRACKET, MAX_LABEL)).strip()
        is_complete = yield from self.scan.accept("[ARGS]")
        first = yield from self.scan.peek()
        if not name or (first != "{" and not (is_complete and first == END)):
            return False
        return (yield from self.call_with_json(name, call_id))


class KimiK2(ToolFormat):
    """Kimi K2: every call has an id of function and number, which the next turn has to repeat."""

    framing = ToolFraming(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    )
    openers = ("<|tool_call_begin|>",)
    sections = ("<|tool_calls_section_begin|>",)
    closers = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
    inner = ("<|tool_call_argument_begin|>",)

    def read(self, opener: str) -> Steps[bool]:
        """Reads a call after its beginning."""
        markers = self.markers(*self.inner, *self.closers)
        head, marker = yield from self.scan.collect(markers, MAX_LABEL)
        if marker not in self.inner:
            return False
        call_id = head.strip()
        name = call_id.removeprefix("functions.")
        base, colon, number = name.rpartition(":")
        name = base if colon and number.strip().isdigit() else name
        return bool(name) and (yield from self.call_with_json(name, call_id, self.closers))


class SolarOpen(ToolFormat):
    """Solar Open: a call is an id of ten letters and digits, a name and JSON, with a token before each."""

    framing = ToolFraming(
        "<|tool_call:begin|>{index}<|tool_call:name|>{name}<|tool_call:args|>",
        "<|tool_call:end|>",
        begin="<|tool_calls|>",
    )
    openers = ("<|tool_call:begin|>",)
    sections = ("<|tool_calls|>",)
    closers = ("<|tool_call:end|>", "<|calls|>")
    inner = ("<|tool_call:name|>", "<|tool_call:args|>")

    def new_id(self) -> str:
        """Returns ten letters and digits."""
        return hashlib.sha256(new_call_id().encode()).hexdigest()[:10]

    def read(self, opener: str) -> Steps[bool]:
        """Reads a call after its beginning."""
        before_name, before_arguments = self.inner
        ends = (*self.inner, *self.closers)
        call_id, marker = yield from self.scan.collect(self.markers(*ends), MAX_LABEL)
        if marker != before_name:
            return False
        name, marker = yield from self.scan.collect(self.markers(*ends), MAX_LABEL)
        name, call_id = name.strip(), call_id.strip()
        if marker != before_arguments or not name:
            return False
        # The number that grammars give to a call is no id.
        return (yield from self.call_with_json(name, call_id if len(call_id) > 3 else "", self.closers))


class DeepseekV31(ToolFormat):
    """DeepSeek V3.1: a name, a token, JSON."""

    framing = ToolFraming(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    )
    openers = ("<｜tool▁call▁begin｜>",)
    sections = ("<｜tool▁calls▁begin｜>",)
    closers = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    inner = ("<｜tool▁sep｜>",)

    def read(self, opener: str) -> Steps[bool]:
        """Reads a call after its beginning."""
        name = yield from self._head()
        return bool(name) and (yield from self.call_with_json(name, ends=self.closers))

    def _head(self) -> Steps[str]:
        """Returns the text before the separator; empty when there is none."""
        text, marker = yield from self.scan.collect(self.markers(*self.inner, *self.closers), MAX_LABEL)
        return text.strip() if marker in self.inner else ""


_LINE = Markers(("\n",))


class DeepseekV3(DeepseekV31):
    """DeepSeek V3 and R1: the kind of tool, its name, and the arguments in a Markdown block."""

    framing = ToolFraming(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        separator="\n",
        end="<｜tool▁calls▁end｜>",
    )

    def read(self, opener: str) -> Steps[bool]:
        """Reads a call after its beginning."""
        if not (yield from self._head()):
            return False
        name, marker = yield from self.scan.collect(_LINE, MAX_LABEL)
        if marker != "\n" or not name.strip():
            return False
        yield from self.scan.skip_space()
        yield from self.scan.accept("```json")
        if not (yield from self.call_with_json(name.strip(), ends=("```", *self.closers))):
            return False
        yield from self.scan.skip_space()
        yield from self.scan.accept("```")
        return True
