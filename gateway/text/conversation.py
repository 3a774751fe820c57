"""From a conversation to the text of a prompt, in which only the template's control tokens count."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.text.chat_template import ChatTemplate, ChatTemplateError
from gateway.text.control_tokens import ControlTokens, choose_mark, escaped, map_strings, strings_of


@dataclass(frozen=True)
class MarkedText:
    """A text and the character that marks what is no control token in it; filled by `render_prompt`."""

    text: str
    mark: str = ""  # empty: nothing is marked


@dataclass(frozen=True)
class Conversation:
    """What a chat template is rendered from; filled by the request's preparation."""

    messages: Sequence[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    def render(self, template: ChatTemplate) -> str:
        """The prompt's text; ChatTemplateError when the template refuses."""
        return template.render(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            kwargs=self.kwargs,
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
        """The text, marked; in the model's own answers only the tokens `of_answers` (None: all)."""
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
        )
        return marked.render(self._template).replace(escaped(self._mark), self._mark)

    def _plain(self, of_answers: Collection[str] | None) -> str:
        return self.render(of_answers).replace(self._mark, "")

    def best(self) -> str:
        """The text with everything marked that the template does not read.

        Templates look for some tokens in the model's former answers, to leave out its thoughts for
        example: those that change the text when they are marked stay what they are, in answers only.
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
    """The prompt's text, with marks in the control tokens that the conversation's own text spells.

    Args:
        template: the model's.
        controls: the spellings of the model's control tokens.
        conversation: what is rendered.
        parse_special: the client asks for control tokens: nothing is marked.
    Raises:
        ChatTemplateError: the template refused the conversation.
    """
    given = [*conversation.messages, conversation.kwargs]
    if parse_special or not _needs_marks(controls, given):
        return MarkedText(conversation.render(template))
    mark = choose_mark([template.source, *strings_of(given)])
    if mark is None:
        raise ChatTemplateError("the conversation contains every private-use character of Unicode")
    return MarkedText(_Marking(template, controls, conversation, mark).best(), mark)


def mark_text(controls: ControlTokens, text: str) -> MarkedText:
    """A plain text as it is, its control tokens marked."""
    if not _needs_marks(controls, text):
        return MarkedText(text)
    mark = choose_mark([text])
    if mark is None:
        raise ChatTemplateError("the text contains every private-use character of Unicode")
    return MarkedText(controls.marker(mark)(text), mark)


def _needs_marks(controls: ControlTokens, value: Any) -> bool:
    return any(controls.touches(text) for text in strings_of(value))
