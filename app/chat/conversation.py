"""The conversation of `moebius chat`: its messages, its settings, and the commands that change them."""

from __future__ import annotations

import base64
import difflib
import json
import mimetypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.chat.answer import Answer, Message
from moebius.errors import UserError

HELP = """\
/help              this list
/clear             forget the conversation; the system message stays
/system [TEXT]     show or set the system message; - removes it
/image FILE|URL    send an image with the next message
/regenerate        ask the last question again
/set [NAME VALUE]  show or set a field of the request: /set temperature 0; - as VALUE removes it
/save FILE         write the conversation as JSON
/load FILE         go on with a saved conversation
/exit              end (so does Ctrl-D)
A message that begins with / is sent when it begins with //. Alt-Enter begins a new line, pasted text keeps
its lines, Ctrl-C cuts an answer short and keeps what came."""
COMMANDS = ("help", "clear", "system", "image", "regenerate", "set", "save", "load", "exit", "quit")
# What makes the conversation itself is not set by name.
_OWN_FIELDS = ("messages", "stream", "stream_options", "n")


@dataclass(frozen=True)
class Outcome:
    """What a line asks of the terminal; filled by `Conversation.enter`."""

    says: str = ""  # to be shown
    asks: bool = False  # the messages are to be sent
    ends: bool = False


@dataclass
class Conversation:
    """Filled by the command's options, then by `enter` and `answered`."""

    body: dict[str, Any]  # fields of the request besides the messages
    system: str = ""
    messages: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # URLs that go with the next message

    def request_messages(self) -> list[Message]:
        """Returns the system message, if there is one, and the conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def ask(self, text: str) -> None:
        """Adds the user's message, with the images that wait for one."""
        content: Any = text
        if self.images:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content = [*parts, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})
        self.images = []

    def answered(self, answer: Answer) -> None:
        """Keeps an answer, also one that was cut short; nothing of it: the question stays for /regenerate."""
        if not answer.is_empty:
            self.messages.append(answer.message())

    def enter(self, line: str) -> Outcome:
        """Takes what the user typed.

        Raises:
            UserError: a command is unknown, or cannot be carried out; nothing has changed.
        """
        text = line.strip()
        if not text:
            return Outcome()
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].partition(" ")
            return self._command(name, argument.strip())
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()  # it got no answer, and templates want turns
        self.ask(text[1:] if text.startswith("//") else text)
        return Outcome(asks=True)

    def _command(self, name: str, argument: str) -> Outcome:
        if name not in COMMANDS:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            raise UserError(
                f"/{name} is not a command" + (f"; did you mean /{close[0]}?" if close else "; see /help")
            )
        if name in ("exit", "quit"):
            return Outcome(ends=True)
        if name == "help":
            return Outcome(HELP)
        result: Outcome = getattr(self, f"_{name}")(argument)
        return result

    def _clear(self, argument: str) -> Outcome:
        self.messages, self.images = [], []
        return Outcome("the conversation is cleared")

    def _system(self, argument: str) -> Outcome:
        if argument:
            self.system = "" if argument == "-" else argument
        return Outcome(f"system message: {self.system}" if self.system else "there is no system message")

    def _image(self, argument: str) -> Outcome:
        if not argument:
            raise UserError("/image needs a file or a URL")
        self.images.append(image_url(argument))
        return Outcome(f"{len(self.images)} image(s) will be sent with the next message")

    def _regenerate(self, argument: str) -> Outcome:
        kept = list(self.messages)
        while kept and kept[-1]["role"] != "user":
            kept.pop()
        if not kept:
            raise UserError("there is no question yet")
        self.messages = kept
        return Outcome(asks=True)

    def _set(self, argument: str) -> Outcome:
        name, _, value = argument.partition(" ")
        value = value.strip()
        if not name:
            return Outcome("\n".join(f"{key} = {json.dumps(item)}" for key, item in self.body.items()))
        if name in _OWN_FIELDS:
            raise UserError(f"/set cannot change {name}: the conversation fills it in")
        if not value:
            return Outcome(
                f"{name} = {json.dumps(self.body[name])}" if name in self.body else f"{name} is not set"
            )
        if value == "-":
            self.body.pop(name, None)
            return self._shown(name)
        try:
            self.body[name] = json.loads(value)
        except ValueError:
            self.body[name] = value
        return self._shown(name)

    def _shown(self, name: str) -> Outcome:
        is_set = name in self.body
        return Outcome(f"{name} = {json.dumps(self.body[name])}" if is_set else f"{name} is not set")

    def _save(self, argument: str) -> Outcome:
        path = _path(argument, "/save")
        document = {"settings": self.body, "system": self.system, "messages": self.messages}
        try:
            path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        return Outcome(f"saved {len(self.messages)} messages to {path}")

    def _load(self, argument: str) -> Outcome:
        path = _path(argument, "/load")
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            messages, system = document["messages"], document.get("system", "")
            is_right = isinstance(system, str) and all(
                isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
            )
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            is_right = False
        if not is_right:
            raise UserError(f"{path} is not a conversation saved by /save")
        self.messages, self.system = list(messages), system
        settings = document.get("settings")
        if isinstance(settings, dict):
            # Another server may serve another model.
            self.body = {**settings, "model": self.body["model"]}
        return Outcome(f"loaded {len(self.messages)} messages from {path}")


def image_url(place: str) -> str:
    """Returns what a request says of an image: its URL, or of a file the contents as a data URL.

    Raises UserError.
    """
    if place.startswith(("http://", "https://", "data:")):
        return place
    path = Path(place).expanduser()
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        raise UserError(f"{place}: its name does not say which kind of image it is (.png, .jpg, .webp)")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {place}: {error.strerror}") from None
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UserError(f"{command} needs a file name")
    return Path(argument).expanduser()
