"""`moebius chat`: talk to a running server; `moebius run`: start a model, ask it one thing, stop."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from app.access_options import Access, with_access
from app.cli_options import BaseUrl, ModelName, with_settings
from app.server_address import server_url
from moebius.config import MoebiusConfig
from moebius.errors import UserError

MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Longest answer, tokens; unset: as long as the model's context allows"),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy")]
System = Annotated[str, typer.Option(help="System message")]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", help="Image file or URL sent with the first message; again for more"),
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    _add_chat(app)
    _add_run(app)


def _add_chat(app: typer.Typer) -> None:
    @app.command()
    @with_access
    def chat(
        server: Annotated[
            str, typer.Argument(metavar="URL|PORT", help="Running server, as --base-url", show_default=False)
        ] = "",
        prompt: Annotated[str, typer.Option(help="Ask this, print the answer, end")] = "",
        base_url: BaseUrl = "",
        model: ModelName = "",
        system: System = "",
        image: Images = None,
        *,
        access: Access,
        max_tokens: MaxTokens = None,
        temperature: Temperature = 0.7,
    ) -> None:
        """Chat with a running server; answers stream. /help lists what can be typed besides messages."""
        from app.chat.answer import stream_answer
        from app.chat.conversation import Conversation, image_url
        from app.chat.terminal import converse

        images = [image_url(place) for place in image or ()]
        client = access.client(_address(server, base_url))
        name = model or client.first_model().name
        conversation = Conversation(_body(name, max_tokens, temperature), system, images=images)
        if prompt:
            conversation.ask(prompt)
            stream_answer(client, conversation.body, conversation.request_messages())
        else:
            converse(client, conversation)


def _add_run(app: typer.Typer) -> None:
    @app.command()
    @with_settings(needs_device=True)
    def run(
        config: MoebiusConfig,
        prompt: Annotated[
            str,
            typer.Argument(
                help="What to ask [default: what a pipe brings]", metavar="PROMPT", show_default=False
            ),
        ] = "",
        system: System = "",
        image: Images = None,
        max_tokens: MaxTokens = None,
        temperature: Temperature = 0.0,
    ) -> None:
        """Start MODEL, answer one PROMPT on stdout, stop everything."""
        from app.chat.conversation import Conversation, image_url
        from app.commands.models import check_files, with_checkpoint
        from app.commands.once import ask_once, quiet
        from app.planning.fill import with_filled_gpus
        from app.supervisor.plan import plan_processes
        from moebius.telemetry import configure_logging

        prompt = prompt or _piped()
        if not prompt:
            raise UserError(
                "PROMPT is missing: moebius run MODEL 'What is the capital of France?'; for a conversation "
                "`moebius serve MODEL`, and `moebius chat` in another terminal"
            )
        images = [image_url(place) for place in image or ()]
        config = with_checkpoint(quiet(config))
        check_files(config)
        configure_logging(config.telemetry, "supervisor")
        serve_plan = plan_processes(with_filled_gpus(config))
        name = serve_plan.config.model.served_model_name
        conversation = Conversation(_body(name, max_tokens, temperature), system, images=images)
        conversation.ask(prompt)
        ask_once(serve_plan, conversation.body, conversation.request_messages())


def _piped() -> str:
    """Returns what stdin has to say where it is no terminal. Raises UserError for bytes that are no text."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError:
        raise UserError("PROMPT: what the pipe brings is not valid UTF-8") from None


def _address(given: str, base_url: str) -> str:
    """Returns a server's URL: as given, or of a port here; else `base_url`, else of the only server here.

    Raises UserError for a model, which other programs' `chat` starts.
    """
    if not given:
        return base_url or server_url("")
    if given.isdecimal():
        return server_url(given)
    if not given.startswith(("http://", "https://")):
        raise UserError(
            f"{given!r} is no server's address (http://HOST:PORT): `moebius serve {given}` starts a model, "
            "`moebius chat` then talks to it"
        )
    return given


def _body(model: str, max_tokens: int | None, temperature: float) -> dict[str, Any]:
    body = {"model": model, "temperature": temperature}
    return body if max_tokens is None else body | {"max_tokens": max_tokens}
