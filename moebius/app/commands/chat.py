"""`moebius chat`: talk to a running server; `moebius run`: start a model, ask it one thing, stop."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moebius.api_keys import client_key
from moebius.app.cli_options import (
    ApiKey,
    ApiKeyFile,
    BaseUrl,
    CaFile,
    ClientCertFile,
    ClientKeyFile,
    ModelName,
    with_settings,
)
from moebius.config import MoebiusConfig

MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer, tokens")]
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
    def chat(
        prompt: Annotated[str, typer.Option(help="Ask this, print the answer, end")] = "",
        base_url: BaseUrl = "http://127.0.0.1:8000",
        model: ModelName = "",
        system: System = "",
        image: Images = None,
        api_key: ApiKey = "",
        api_key_file: ApiKeyFile = "",
        ca_file: CaFile = "",
        client_cert_file: ClientCertFile = "",
        client_key_file: ClientKeyFile = "",
        max_tokens: MaxTokens = 1024,
        temperature: Temperature = 0.7,
    ) -> None:
        """Chat with a running server; answers stream. /help lists what can be typed besides messages."""
        from moebius.app.chat.answer import stream_answer
        from moebius.app.chat.conversation import Conversation, image_url
        from moebius.app.chat.terminal import converse
        from moebius.app.client import ApiClient, ClientTls

        images = [image_url(place) for place in image or ()]
        tls = ClientTls(ca_file, client_cert_file, client_key_file)
        client = ApiClient(base_url, client_key(api_key, api_key_file), tls=tls)
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
        prompt: Annotated[str, typer.Argument(help="What to ask", metavar="PROMPT")] = "",
        system: System = "",
        image: Images = None,
        max_tokens: MaxTokens = 1024,
        temperature: Temperature = 0.0,
    ) -> None:
        """Start MODEL, answer one PROMPT on stdout, stop everything."""
        from moebius.app.chat.conversation import Conversation, image_url
        from moebius.app.commands.models import check_files, with_checkpoint
        from moebius.app.commands.once import ask_once, quiet
        from moebius.app.supervisor.plan import plan_processes
        from moebius.errors import UserError
        from moebius.telemetry import configure_logging

        if not prompt:
            raise UserError("PROMPT is missing: moebius run MODEL 'What is the capital of France?'")
        images = [image_url(place) for place in image or ()]
        config = with_checkpoint(quiet(config))
        check_files(config)
        configure_logging(config.telemetry, "supervisor")
        serve_plan = plan_processes(config)
        name = serve_plan.config.model.served_model_name
        conversation = Conversation(_body(name, max_tokens, temperature), system, images=images)
        conversation.ask(prompt)
        ask_once(serve_plan, conversation.body, conversation.request_messages())


def _body(model: str, max_tokens: int, temperature: float) -> dict[str, Any]:
    return {"model": model, "max_tokens": max_tokens, "temperature": temperature}
