"""The `moebius` command. Commands import what they need when they run, so that `--help` is quick.

What a user did wrong ends as one line on stderr and a non-zero exit status, never as a traceback; a
traceback means a defect of Moebius.
"""

from __future__ import annotations

import typer

from moebius.app.commands import bench, chat, demo, experts, host, models, plan, serve, verify
from moebius.app.exits import exit_with

app = typer.Typer(
    name="moebius",
    help="Serves mixture-of-experts models on GPUs and CPU sockets together.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for module in (serve, plan, chat, demo, host, verify):
    module.register(app)
app.add_typer(bench.app, name="bench")
app.add_typer(models.app, name="models")
app.add_typer(experts.app, name="experts")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its status."""
    exit_with(lambda: app(args=arguments, prog_name="moebius", standalone_mode=False))
