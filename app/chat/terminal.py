"""The dialogue: lines from a terminal with editing and history, or from a pipe, and answers to them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.chat.answer import Answer, Printer, collect, cut_off
from app.chat.conversation import COMMANDS, Conversation
from app.client import ApiClient
from app.user_state import user_state_directory
from moebius.errors import UserError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "> "


def converse(client: ApiClient, conversation: Conversation) -> None:
    """Asks the user until the end of input; the whole conversation is sent each time.

    Errors of commands and of the server are shown and the dialogue goes on: the next message connects again.
    """
    read = _reader(conversation)
    while True:
        try:
            line = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        try:
            outcome = conversation.enter(line)
        except UserError as error:
            _note(str(error))
            continue
        if outcome.ends:
            return
        if outcome.says:
            _note(outcome.says)
        if outcome.asks:
            _answer(client, conversation)


def _answer(client: ApiClient, conversation: Conversation) -> None:
    """One answer, kept as far as it came."""
    answer, note = Answer(), ""
    try:
        body = {**conversation.body, "messages": conversation.request_messages()}
        collect(client.stream("/v1/chat/completions", body), answer, Printer())
        note = (
            f"{answer.completion_tokens} tokens, {answer.tokens_per_second:.1f} tokens/s, "
            f"first after {answer.time_to_first_token:.2f} s"
        )
        if cut := cut_off(answer, conversation.body, "/set max_tokens N"):
            note += f"; {cut}"
    except KeyboardInterrupt:
        answer.finish_reason, note = "interrupted", "interrupted; what came is kept"
    except UserError as error:
        note = f"{error}  (/regenerate asks again)"
    conversation.answered(answer)
    _note(note)


def _note(text: str) -> None:
    """Writes a line of the program, not of the model: on stderr, dimmed on a terminal."""
    dimmed = f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text
    print(dimmed, file=sys.stderr, flush=True)


def _reader(conversation: Conversation) -> Callable[[], str]:
    """Returns what gives the next message. Raises EOFError at the end and KeyboardInterrupt on Ctrl-C."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        if isinstance(sys.stdin, io.TextIOWrapper):
            # What is not UTF-8 is refused when it is sent, and the lines after it are read.
            sys.stdin.reconfigure(errors="surrogateescape")
        return _read_line
    name = conversation.body["model"]
    _note(f"{name}  (/help lists the commands, Ctrl-D ends)")
    session = _session()
    return lambda: str(session.prompt(PROMPT))


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    class Remembered(FileHistory):
        """A disk that is full, or has gone, ends no dialogue: it is said once."""

        is_lost = False

        def load_history_strings(self) -> Iterable[str]:
            try:
                # Read here: the file may go between the look whether it is there and its opening.
                return list(super().load_history_strings())
            except OSError:
                return []

        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                if not self.is_lost:
                    _note(f"messages are not remembered: {path}: {error.strerror}")
                self.is_lost = True

    path = _history_file()
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("enter")
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    return PromptSession(
        history=InMemoryHistory() if path is None else Remembered(str(path)),
        completer=WordCompleter([f"/{command}" for command in COMMANDS], sentence=True),
        complete_while_typing=False,
        key_bindings=bindings,
        # Pasted text and Alt-Enter make lines; Enter alone sends them.
        multiline=True,
        prompt_continuation="  ",
        enable_history_search=False,
    )


def _history_file() -> Path | None:
    """Returns where messages are remembered, for their author only; None where there is no such place."""
    try:
        directory = user_state_directory()
    except RuntimeError:
        _note("messages are not remembered: this user has no home directory, and HOME is not set")
        return None
    path = directory / "chat_history"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError as error:
        _note(f"messages are not remembered: {path}: {error.strerror}")
        return None
    return path
