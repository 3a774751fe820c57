"""A system that is started for one request: `moebius demo` and `moebius run`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from moebius.config import MoebiusConfig

if TYPE_CHECKING:
    from app.chat.answer import Answer, Message
    from app.supervisor.plan import ServePlan


def for_this_process(config: MoebiusConfig) -> MoebiusConfig:
    """Returns a gateway that only the process that starts it calls: plain HTTP on this machine,
    without keys.
    """
    own: dict[str, Any] = {"host": "127.0.0.1", "api_key": "", "api_key_file": ""}
    plain = {"http_cert_file": "", "http_key_file": "", "http_client_ca_file": ""}
    return config.model_copy(
        update={
            "gateway": config.gateway.model_copy(update=own),
            "security": config.security.model_copy(update=plain),
        }
    )


def quiet(config: MoebiusConfig) -> MoebiusConfig:
    """For one request of this process, with any free port and only warnings logged, unless flags said
    otherwise."""
    config, defaults = for_this_process(config), MoebiusConfig()
    gateway, telemetry = config.gateway, config.telemetry
    if gateway.port == defaults.gateway.port:
        gateway = gateway.model_copy(update={"port": 0})
    if telemetry.log_level == defaults.telemetry.log_level:
        telemetry = telemetry.model_copy(update={"log_level": "warning"})
    return config.model_copy(update={"gateway": gateway, "telemetry": telemetry})


def ask_once(
    serve_plan: ServePlan,
    body: dict[str, Any],
    messages: list[Message],
    on_ready: Callable[[], None] = lambda: None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> None:
    """Starts the system, streams an answer to stdout, stops everything.

    `on_answer` is called while everything still runs. Raises typer.Exit when a signal came first, and
    what went wrong with the request.
    """
    from app.chat.answer import stream_answer
    from app.client import ApiClient
    from app.commands.running import running

    answers: list[Answer | BaseException] = []
    client = ApiClient(serve_plan.base_url)

    def ask() -> None:
        try:
            answers.append(stream_answer(client, body, messages))
        except BaseException as error:
            answers.append(error)

    with running(serve_plan) as supervisor:
        if supervisor.stopping:
            raise typer.Exit(128 + supervisor.ended_by)
        on_ready()
        # The main thread goes on watching the processes: what dies meanwhile is restarted as in service.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        supervisor.run(until=lambda: not asking.is_alive())
        if not answers:
            raise typer.Exit(128 + supervisor.ended_by)
        answer = answers[0]
        if isinstance(answer, BaseException):
            raise answer
        on_answer(answer)
