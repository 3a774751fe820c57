"""Renders conversations with Hugging Face chat templates, and keeps clients' text apart from control tokens.

Templates run in a Jinja sandbox, with the helpers that they rely on. Models that are published with Python
code instead of a template get one from `templates`, which writes the same text as that code.

Users type `<|im_start|>` too, and a tokenizer cannot tell who wrote it. So before a template is rendered,
every control token spelled in a client's text gets one character put after its first, the mark, which
appears nowhere else. Templates treat marked text like any other (they may strip it, test it, quote it as
JSON), the spelling is no token any more, and `Tokenizer.encode` takes the marks out while it tokenises, so
that the letters around them form ordinary tokens. Text without control tokens is never touched: its ids are
those of `apply_chat_template`. The alternatives lose that: encoding contents apart from the template's text
breaks templates that look into contents, and the `tokenizers` switch `encode_special_tokens` is for a whole
text, the template's tokens included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text.template_constants import constant_texts

# The text of ERNIE 4.5 VL's released template for an image, and the token that its image processor, which is
# code next to the checkpoint, replaces it by.
_IMAGE_TEXT, _IMAGE_TOKEN = "<|image@placeholder|>", "<|IMAGE_PLACEHOLDER|>"
# Per model_type: a file of `templates`, and a token that later releases of the same type have, whose
# conversations have another format.
_OWN_TEMPLATES = {
    "deepseek_v32": ("deepseek_v32.jinja", ""),
    "deepseek_v4": ("deepseek_v4.jinja", "<｜System｜>"),
}


class ChatTemplateError(ValueError):
    """The template refused the conversation, or does not support the request; the message says why."""


def own_template(model_type: str, added_tokens: Container[str]) -> str:
    """Returns our template for a model that is published without any, or an empty string if there is none.

    Args:
        model_type: as in the checkpoint's config.json.
        added_tokens: texts of the tokenizer's added tokens.
    """
    file, later = _OWN_TEMPLATES.get(model_type, ("", ""))
    if not file or (later and later in added_tokens):
        return ""
    return (Path(__file__).parent / "templates" / file).read_text(encoding="utf-8")


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks assistant text for training, and renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Consumes the block and returns its statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _NothingComputed(jinja2.compiler.CodeGenerator):
    """Leaves constants to rendering, which is bounded: compiling `{{ 'a' * 10**9 }}` would evaluate it."""

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _NothingComputed

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allows lists as queues, which llama.cpp's templates for Kimi K2 in GGUF files use."""
        is_queue = type(obj) is list and attr in ("append", "pop")
        return is_queue or super().is_safe_attribute(obj, attr, value)


def _raise_exception(message: str) -> NoReturn:
    """Refuses a conversation; called by templates."""
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without HTML escapes, unlike jinja2's own filter: models were trained on plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    """Returns local time; some templates write today's date into the system message."""
    return datetime.now().strftime(form)


class ChatTemplate:
    """One compiled template; rendering is pure and thread-safe."""

    def __init__(self, source: str, named_tokens: dict[str, str]) -> None:
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
            optimized=False,
        )
        source = source.replace(_IMAGE_TEXT, _IMAGE_TOKEN)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        self._named_tokens = named_tokens
        self.knows_developer = "developer" in source
        self.knows_tools = re.search(r"\btools\b", source) is not None
        # Variables that a request can set: `tools`, `enable_thinking` and such, and the template's own names.
        # From the tree: `jinja2.meta` would evaluate constants, of which a template may have endless ones.
        tree = environment.parse(source)
        names = tree.find_all(jinja2.nodes.Name)
        self.variables = frozenset(name.name for name in names if name.ctx == "load")
        self.source = source
        # The source with the tags that it composes.
        self.spelled_source = "\n".join((source, *constant_texts(tree)))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt text of a conversation.

        Args:
            messages: role and content (a string), and further keys the template may know.
            add_generation_prompt: open an assistant turn at the end.
            continue_final_message: end right after the last message's content, so that the model continues
                it; excludes `add_generation_prompt`.
            kwargs: further template variables (`documents`, `enable_thinking` and such).
            tools: functions that the model may call, as OpenAI writes them; None: there are none.
        Raises:
            ChatTemplateError: the template refused the conversation.
        """
        try:
            text = self._template.render(
                **{**self._named_tokens, "documents": None, **(kwargs or {})},
                messages=[self._prepared(message) for message in messages],
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise  # not about the conversation
        except Exception as error:  # a template is a program: it can fail in any way
            raise ChatTemplateError(f"the chat template refused the conversation: {error}") from error
        return _cut_after(text, messages[-1]) if continue_final_message else text

    def _prepared(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns `developer` messages as `system` ones for templates that would drop their text."""
        if message["role"] == "developer" and not self.knows_developer:
            return {**message, "role": "system"}
        return message


def _cut_after(text: str, message: dict[str, Any]) -> str:
    """Returns `text` up to the end of the last message's content, without end-of-turn markers."""
    content = str(message.get("content") or "")
    position = text.rfind(content.strip())
    if not content.strip() or position < 0:
        raise ChatTemplateError("the chat template changed the final message, which cannot be continued")
    end = position + len(content.strip())
    trailing = content[len(content.rstrip()) :]
    return text[: end + len(trailing)] if text.startswith(trailing, end) else text[:end]


# Unicode's noncharacters and private use; the mark is the first that request and template do not contain.
_MARKS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xE000, 0xF900))]
# The spelling of role markers that are added tokens, but not `special` ones.
_MARKER = re.compile(r"<[|｜].*[|｜]>|｜.*｜")


def is_control(content: str, special: bool) -> bool:
    """Returns whether an added token is written by templates to steer the model, not a word of the text."""
    return len(content) > 1 and (special or _MARKER.fullmatch(content) is not None)


class ControlTokens:
    """The spellings of a model's control tokens, from the tokenizer's added tokens."""

    def __init__(self, spellings: Iterable[str], seamless: bool = True) -> None:
        """`seamless`: marks leave no trace in the ids, so that they may be where there is no token yet."""
        self._spellings = sorted(set(spellings), key=lambda spelling: (-len(spelling), spelling))
        self._whole = _pattern(self._spellings)
        # A text that ends with the beginning of a token could become one together with the template's text.
        starts = {text[:end] for text in self._spellings for end in range(1, len(text)) if seamless}
        self._longest_start = max(map(len, starts), default=0)
        self._starts = frozenset(starts)

    def found(self, value: Any) -> list[str]:
        """Returns the control tokens in the strings of `value` (lists and mappings included), sorted."""
        found: set[str] = set()
        for text in strings_of(value):
            if self._whole is not None and self._whole.search(text):
                found.update(spelling for spelling in self._spellings if spelling in text)
        return sorted(found)

    def touches(self, text: str) -> bool:
        """Returns whether `marker` would change this text."""
        return self._start_at_end(text) > 0 or (self._whole is not None and bool(self._whole.search(text)))

    def marker(self, mark: str, only: Collection[str] | None = None) -> Callable[[str], str]:
        """Returns a function that puts `mark` into each control token of a text, or into those of `only`."""
        whole = self._whole if only is None else _pattern(sorted(only, key=lambda item: (-len(item), item)))

        def marked(text: str) -> str:
            text = text if whole is None else whole.sub(rf"\g<0>{mark}", text)
            return text if only is not None else self._end_marked(text, mark)

        return marked

    def _end_marked(self, text: str, mark: str) -> str:
        """Returns `text`, marked where it ends with the beginning of a token."""
        cut = len(text) - self._start_at_end(text) + 1
        return text if cut > len(text) else text[:cut] + mark + text[cut:]

    def _start_at_end(self, text: str) -> int:
        """Returns the length of the longest beginning of a token that `text` ends with, or 0."""
        lengths = range(min(self._longest_start, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._starts), 0)


def _pattern(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """Returns a pattern of each spelling's first character, also if two overlap; None without spellings."""
    rests: dict[str, list[str]] = {}
    for spelling in spellings:
        rests.setdefault(spelling[0], []).append(re.escape(spelling[1:]))
    heads = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in sorted(rests.items())]
    return re.compile("|".join(heads)) if heads else None


def choose_mark(texts: Iterable[str]) -> str | None:
    """Returns a character that none of `texts` contains, plain or as a JSON escape; None if there is none."""
    listed = list(texts)
    return next((mark for mark in _MARKS if not any(mark in t or escaped(mark) in t for t in listed)), None)


def escaped(mark: str) -> str:
    """Returns the mark as spelled by a template that writes ASCII JSON."""
    return json.dumps(mark)[1:-1]


def strings_of(value: Any) -> Iterator[str]:
    """Yields all strings in nested lists and mappings, keys included."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Returns `value` with every string of nested lists and mappings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        changed = {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


@dataclass(frozen=True)
class MarkedText:
    """A text and the character that marks non-control tokens in it; filled by `render_prompt`."""

    text: str
    mark: str = ""  # empty: nothing is marked

    @property
    def plain(self) -> str:
        """The text without marks."""
        return self.text.replace(self.mark, "") if self.mark else self.text


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template; filled by the request's preparation."""

    messages: Sequence[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None  # as `ToolFunction.for_template` returns them

    def render(self, template: ChatTemplate) -> str:
        """Returns the prompt's text. Raises ChatTemplateError when the template refuses."""
        return template.render(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            kwargs=self.kwargs,
            tools=self.tools,
        )


class _Marking:
    """Renders one conversation with marks; made by `render_prompt`."""

    def __init__(
        self, template: ChatTemplate, controls: ControlTokens, conversation: Conversation, mark: str
    ) -> None:
        self._template = template
        self._controls = controls
        self._conversation = conversation
        self._mark = mark

    def render(self, of_answers: Collection[str] | None) -> str:
        """Returns the marked text; in the model's own answers only the tokens `of_answers` (None: all)."""
        everywhere = self._controls.marker(self._mark)
        in_answers = self._controls.marker(self._mark, of_answers)
        given = self._conversation
        marked = Conversation(
            [
                map_strings(message, in_answers if message["role"] == "assistant" else everywhere)
                for message in given.messages
            ],
            given.add_generation_prompt,
            given.continue_final_message,
            {name: map_strings(value, everywhere) for name, value in given.kwargs.items()},
            map_strings(given.tools, everywhere),
        )
        return marked.render(self._template).replace(escaped(self._mark), self._mark)

    def _plain(self, of_answers: Collection[str] | None) -> str:
        return self.render(of_answers).replace(self._mark, "")

    def best(self) -> str:
        """Returns the text with everything marked that the template does not read.

        Templates look for some tokens in the model's former answers, to leave out its thoughts for
        example: tokens whose marks change the rendered text stay unmarked, in answers only.
        """
        answers = [m for m in self._conversation.messages if m["role"] == "assistant"]
        candidates = self._controls.found(answers)
        text = self.render(None)
        if not candidates:
            return text
        unmarked = self._plain(())
        if text.replace(self._mark, "") == unmarked:
            return text
        return self.render([token for token in candidates if self._plain([token]) == unmarked])


def render_prompt(
    template: ChatTemplate, controls: ControlTokens, conversation: Conversation, parse_special: bool = False
) -> MarkedText:
    """Returns the prompt's text, with marks in the control tokens that the conversation's own text spells.

    Args:
        template: the model's template.
        controls: the spellings of the model's control tokens.
        conversation: the messages and variables.
        parse_special: the client asks for control tokens: nothing is marked.
    Raises:
        ChatTemplateError: the template refused the conversation.
    """
    given = [*conversation.messages, conversation.kwargs, conversation.tools]
    if parse_special or not _needs_marks(controls, given):
        return MarkedText(conversation.render(template))
    mark = choose_mark([template.source, *strings_of(given)])
    if mark is None:
        raise ChatTemplateError("the conversation contains every private-use character of Unicode")
    return MarkedText(_Marking(template, controls, conversation, mark).best(), mark)


def mark_text(controls: ControlTokens, text: str) -> MarkedText:
    """Returns a plain text with its control tokens marked."""
    if not _needs_marks(controls, text):
        return MarkedText(text)
    mark = choose_mark([text])
    if mark is None:
        raise ChatTemplateError("the text contains every private-use character of Unicode")
    return MarkedText(controls.marker(mark)(text), mark)


def _needs_marks(controls: ControlTokens, value: Any) -> bool:
    return any(controls.touches(text) for text in strings_of(value))
