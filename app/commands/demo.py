"""`moebius demo` and `moebius demo-model`: the system answers one question on the demo model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli_options import with_settings
from app.commands.models import DEMO, build_demo_model, with_checkpoint
from app.commands.once import ask_once, quiet
from moebius.config import MoebiusConfig

if TYPE_CHECKING:
    from app.chat.answer import Answer
    from app.supervisor.plan import ServePlan

DEMO_SERVERS = 2


def register(app: typer.Typer) -> None:
    """Adds the two commands."""

    @app.command("demo-model")
    def demo_model(
        directory: Annotated[Path | None, typer.Argument(help="Where to build it", metavar="DIR")] = None,
        gguf: Annotated[
            Path | None, typer.Option(help="Base weights already on disk", metavar="FILE")
        ] = None,
    ) -> None:
        """Build the demo model once and print its directory."""
        print(build_demo_model(directory, gguf))

    @app.command()
    @with_settings(model_argument=False, needs_device=True)
    def demo(
        config: MoebiusConfig,
        prompt: Annotated[str, typer.Option(help="What to ask")] = "What is the capital of France?",
    ) -> None:
        """Start the demo model, answer one question, stop. The model is built if need be."""
        from app.planning.fill import with_filled_gpus
        from app.supervisor.plan import plan_processes
        from moebius.telemetry import configure_logging

        config = _demo_settings(config)
        configure_logging(config.telemetry, "supervisor")
        _answer(plan_processes(with_filled_gpus(config)), prompt)


def _demo_settings(config: MoebiusConfig) -> MoebiusConfig:
    """The demo model on two expert servers (as on two sockets), quiet logs, any free port; flags win."""
    config = quiet(config)
    experts = config.experts
    if experts.expert_servers == 0:
        experts = experts.model_copy(update={"expert_servers": DEMO_SERVERS})
    model = config.model.model_copy(update={"model": config.model.model or DEMO})
    return with_checkpoint(config.model_copy(update={"model": model, "experts": experts}))


def _answer(serve_plan: ServePlan, prompt: str) -> None:
    """Starts the system, asks, prints the figures, stops."""
    body = {"model": serve_plan.config.model.served_model_name, "max_tokens": 200, "temperature": 0}
    addresses = serve_plan.config.experts.expert_addresses
    ask_once(
        serve_plan,
        body,
        [{"role": "user", "content": prompt}],
        on_ready=lambda: print(f"\n> {prompt}\n", flush=True),
        on_answer=lambda answer: _print_figures(answer, addresses),
    )


def _print_figures(answer: Answer, expert_addresses: tuple[str, ...]) -> None:
    from app.commands.experts import read_settled_stats

    print(f"\n{answer.completion_tokens} tokens, {answer.tokens_per_second:.1f} tokens/s", end="")
    print(f", time to first token {answer.time_to_first_token:.3f} s")
    for index, stats in enumerate(read_settled_stats(expert_addresses)):
        print(
            f"expert-{index}: {stats.calls} calls, {stats.rows} token rows, busy {stats.busy_seconds:.2f} s"
        )
    sys.stdout.flush()
