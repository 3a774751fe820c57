"""One streamed answer: collected, shown as it arrives, and what it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TextIO

from app.client import ApiClient, StreamPiece

Message = dict[str, Any]

# What a terminal obeys, apart from line feeds and tabs: text of a model must not move the cursor.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass
class ToolCall:
    """A call that the model made; filled piece by piece by `Answer.take`."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Answer:
    """One answer, complete or as far as it came; filled by `collect`. Times in seconds."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    completion_tokens: int = 0
    time_to_first_token: float = 0.0
    total_time: float = 0.0  # From the request to the last token.
    # Why it ended: the server's reason, or "interrupted".
    finish_reason: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first, over the time after the first."""
        return (self.completion_tokens - 1) / max(self.total_time - self.time_to_first_token, 1e-9)

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing of it came."""
        return not (self.text or self.reasoning or self.tool_calls)

    def take(self, piece: StreamPiece, seconds: float) -> None:
        """Adds an event that came `seconds` after the request."""
        if piece.text or piece.reasoning or piece.tool_calls:
            if self.is_empty:
                self.time_to_first_token = seconds
            self.total_time = seconds
        self.text += piece.text
        self.reasoning += piece.reasoning
        for call in piece.tool_calls:
            self._take_call(call)
        if piece.completion_tokens is not None:
            self.completion_tokens = piece.completion_tokens
        self.finish_reason = piece.finish_reason or self.finish_reason

    def message(self) -> Message:
        """Returns the answer as a message of the history."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message

    def _take_call(self, delta: dict[str, Any]) -> None:
        index = int(delta.get("index") or 0)
        while len(self.tool_calls) <= index:
            self.tool_calls.append(ToolCall())
        call, function = self.tool_calls[index], delta.get("function") or {}
        call.id = call.id or str(delta.get("id") or "")
        call.name += str(function.get("name") or "")
        call.arguments += str(function.get("arguments") or "")


class Printer:
    """Writes an answer while it comes; on a terminal reasoning and tool calls too, dimmed."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._is_terminal = self._out.isatty()
        self._part = ""  # of what the latest output was: "reasoning", "text" or a tool call

    def piece(self, piece: StreamPiece) -> None:
        """Shows what is new."""
        if piece.reasoning and self._is_terminal:
            self._write("reasoning", piece.reasoning)
        if piece.text:
            self._write("text", piece.text)
        for call in piece.tool_calls if self._is_terminal else ():
            function = call.get("function") or {}
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            begin = f"calls {name} " if name else ""
            self._write(f"tool call {call.get('index')}", f"{begin}{arguments}")
        self._out.flush()

    def end(self) -> None:
        """The answer is over."""
        print(file=self._out, flush=True)

    def _write(self, part: str, text: str) -> None:
        if self._is_terminal:
            text = text.translate(_CONTROLS)
        if self._part and part != self._part:
            text = "\n\n" + text.lstrip("\n") if self._part == "reasoning" else "\n" + text
        self._part = part
        self._out.write(text if part == "text" or not self._is_terminal else f"{_DIM}{text}{_PLAIN}")


def collect(pieces: Iterable[StreamPiece], answer: Answer, printer: Printer) -> None:
    """Prints the pieces and adds them to `answer`, which keeps what came when this is interrupted.

    Raises:
        KeyboardInterrupt, UserError: by the user or the server; `answer` has what came before.
    """
    begin = time.monotonic()
    try:
        for piece in pieces:
            answer.take(piece, time.monotonic() - begin)
            printer.piece(piece)
    finally:
        printer.end()


def cut_off(answer: Answer, body: dict[str, Any], setting: str) -> str:
    """Returns where an answer was cut off, and by what; empty: it was not.

    `setting`: how `max_tokens` is set.
    """
    if answer.finish_reason != "length":
        return ""
    if body.get("max_tokens") is None:
        return "cut off where the model's context ends"
    return f"cut off at max_tokens ({setting})"


def stream_answer(client: ApiClient, body: dict[str, Any], messages: list[Message]) -> Answer:
    """Asks, writes the answer to stdout as it arrives, and returns it with its times.

    That it was cut off is said on stderr: of a thought that has not ended, stdout may show nothing.
    """
    answer = Answer()
    pieces = client.stream("/v1/chat/completions", {**body, "messages": messages})
    collect(pieces, answer, Printer())
    if note := cut_off(answer, body, "--max-tokens N"):
        print(f"{answer.completion_tokens} tokens, {note}", file=sys.stderr, flush=True)
    return answer
