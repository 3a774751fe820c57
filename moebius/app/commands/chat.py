"""`moebius chat`: talk to a running server, or ask it one thing with `--prompt`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from moebius.api_keys import client_key
from moebius.app.cli_options import ApiKey, ApiKeyFile, BaseUrl, ModelName
from moebius.app.client import ApiClient

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One streamed answer; filled by `stream_answer`. Times in seconds."""

    text: str
    completion_tokens: int
    time_to_first_token: float
    total_time: float  # From the request to the last token.

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first, over the time after the first."""
        return (self.completion_tokens - 1) / max(self.total_time - self.time_to_first_token, 1e-9)


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command()
    def chat(
        prompt: Annotated[str, typer.Option(help="Ask this, print the answer, end")] = "",
        base_url: BaseUrl = "http://127.0.0.1:8000",
        model: ModelName = "",
        system: Annotated[str, typer.Option(help="System message")] = "",
        api_key: ApiKey = "",
        api_key_file: ApiKeyFile = "",
        max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens")] = 1024,
        temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.7,
    ) -> None:
        """Chat with a running server; answers stream."""
        client = ApiClient(base_url, client_key(api_key, api_key_file))
        body = {
            "model": model or client.first_model().name,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        messages = [{"role": "system", "content": system}] if system else []
        if prompt:
            stream_answer(client, body, [*messages, {"role": "user", "content": prompt}])
        else:
            _converse(client, body, messages)


def stream_answer(client: ApiClient, body: dict[str, Any], messages: list[Message]) -> Answer:
    """Asks, writes the answer to stdout as it arrives, and returns it with its times."""
    begin = time.monotonic()
    first: float | None = None
    last = begin
    text, tokens = "", 0
    for piece in client.stream("/v1/chat/completions", {**body, "messages": messages}):
        if piece.text:
            last = time.monotonic()
            first = first if first is not None else last
            text += piece.text
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        tokens = piece.completion_tokens if piece.completion_tokens is not None else tokens
    print(flush=True)
    return Answer(text, tokens, (first if first is not None else last) - begin, last - begin)


def _converse(client: ApiClient, body: dict[str, Any], messages: list[Message]) -> None:
    """Asks the user until end of input; the whole conversation is sent each time."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"[bold]{body['model']}[/bold]  (Ctrl-D ends, Ctrl-C cuts an answer short)")
    while True:
        try:
            question = console.input("[bold cyan]>[/bold cyan] ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not question.strip():
            continue
        asked = [*messages, {"role": "user", "content": question}]
        try:
            answer = stream_answer(client, body, asked)
        except KeyboardInterrupt:
            console.print()
            continue
        messages = [*asked, {"role": "assistant", "content": answer.text}]
        console.print(
            f"[dim]{answer.completion_tokens} tokens, {answer.tokens_per_second:.1f} tokens/s, "
            f"first after {answer.time_to_first_token:.2f} s[/dim]"
        )
