"""Renders Hugging Face chat templates in a Jinja sandbox, with the helpers those templates rely on.

Models that are published with Python code instead of a template get one from `templates`, which writes the
same text as that code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
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
