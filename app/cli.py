"""The `moebius` command. Commands import what they need when they run, so that `--help` is quick.

What a user did wrong ends as one line on stderr and a non-zero exit status, never as a traceback; a
traceback means a defect of Moebius.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from app.commands import (
    bench,
    chat,
    daily,
    demo,
    doctor,
    experts,
    host,
    keys,
    models,
    plan,
    serve,
    show,
    sleep,
    translate,
    upkeep,
    watch,
)
from app.exits import exit_with
from app.option_hints import unknown_options
from app.other_options import note_variables, translated
from moebius import __version__
from moebius.config.loader import sections
from moebius.errors import all_problems

# Headings of `moebius --help`, in the order in which a newcomer meets the commands.
COMMANDS = {
    "Serve": ("demo", "plan", "serve", "run", "chat", "sleep", "wake", "reload"),
    "Look": (
        *("ps", "status", "logs", "stop", "top", "profile", "bench", "doctor", "topology", "experts"),
        *("verify",),
    ),
    "Prepare": (
        "models",
        "pull",
        "list",
        "show",
        "rm",
        "disk",
        "keys",
        "translate",
        "update",
        "demo-model",
        "version",
    ),
    "One process alone": ("gateway", "gpu", "expert", "ranks"),
}


HELP_ALL = "--help-all"


class GroupedCommands(TyperGroup):
    """The commands under a heading each in `moebius --help`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(map(len, self.list_commands(ctx)))
        for heading, names in COMMANDS.items():
            found = [
                (name, command) for name in names if (command := self.get_command(ctx, name)) is not None
            ]
            if found:
                with formatter.section(heading):
                    formatter.write_dl(
                        [
                            (name.ljust(widest), command.get_short_help_str(formatter.width - widest - 6))
                            for name, command in found
                        ]
                    )


app = typer.Typer(
    name="moebius",
    cls=GroupedCommands,
    help="Serves mixture-of-experts models on GPUs and CPU sockets together.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


class GroupedHelp(TyperCommand):
    """A command whose many settings stand under a heading per topic in `--help-all`, and those that most
    people need in `--help`."""

    shows_all = False  # set by `_run`

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        arguments: list[tuple[str, str]] = []
        parameters = self.get_params(ctx)
        is_shown = [self._is_shown(parameter, len(parameters)) for parameter in parameters]
        for parameter in itertools.compress(parameters, is_shown):
            record = parameter.get_help_record(ctx)
            if record is not None:
                section = getattr(parameter, "rich_help_panel", None) or ""
                is_argument = parameter.param_type_name == "argument"
                (arguments if is_argument else groups.setdefault(section, [])).append(record)
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        for section in ["", *(name for name in sections() if name in groups)]:
            with formatter.section(TOPICS.get(section, section.capitalize())):
                formatter.write_dl(groups.get(section, []))
        if hidden := len(is_shown) - sum(is_shown):
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} further settings: {ctx.command_path} --help-all")

    def _is_shown(self, parameter: Any, count: int) -> bool:
        is_setting = bool(getattr(parameter, "rich_help_panel", None))
        return self.shows_all or count <= MOST_OPTIONS or not is_setting or parameter.name in USUAL_SETTINGS


# A command with more options than this shows only the usual ones in `--help`.
MOST_OPTIONS = 60
USUAL_SETTINGS = frozenset(
    {
        *("served_model_name", "max_model_len", "revision", "host", "port", "api_key_file", "chat_template"),
        *("tool_call_parser", "reasoning_parser", "device", "kv_cache_gib", "kv_cache_dtype"),
        *("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "speculative_method"),
        *("expert_dtype", "expert_threads", "tensor_parallel_size", "gpu_experts", "gpu_layers", "log_level"),
    }
)
# Headings of `--help`, by section of the configuration.
TOPICS = {
    "": "Options",
    "model": "Model",
    "images": "Images",
    "gateway": "API (gateway)",
    "gpu": "Engine and memory (gpu)",
    "experts": "Experts on the CPU sockets (experts)",
    "parallel": "Several GPUs (parallel)",
    "placement": "Experts on GPUs (placement)",
    "supervisor": "Supervision (supervisor)",
    "security": "TLS (security)",
    "telemetry": "Telemetry (telemetry)",
}

for module in (serve, plan, chat, demo, host, doctor, watch, translate, daily, show, upkeep, sleep):
    module.register(app)
app.add_typer(bench.app, name="bench")
app.add_typer(models.app, name="models")
app.command("pull")(models.fetch)
app.add_typer(experts.app, name="experts")
app.add_typer(keys.app, name="keys")
# Measuring for developers is a package of its own, which an installation that serves does without.
try:
    import lab.commands
except ModuleNotFoundError as error:
    if error.name not in ("lab", "lab.commands"):
        raise
else:
    lab.commands.register(app, bench.app, models.app)
for registered in app.registered_commands:
    registered.cls = GroupedHelp


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moebius {__version__}")
        raise typer.Exit


@app.callback()
def moebius(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit"
        ),
    ] = False,
) -> None:
    """Serves mixture-of-experts models on GPUs and CPU sockets together."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its status."""
    given = sys.argv[1:] if arguments is None else arguments
    exit_with(lambda: _run(list(given)))


def _command(name: str) -> Any:
    """Returns the command line, with only the one of its commands that is asked for: each has a hundred
    options, and to build all of them takes longer than most commands. With all commands where the name is of
    none.
    """
    part = copy.copy(app)
    part.registered_commands = [each for each in app.registered_commands if name_of(each) == name]
    part.registered_groups = [each for each in app.registered_groups if each.name == name]
    is_known = part.registered_commands or part.registered_groups
    return typer.main.get_command(part if is_known else app)


def refuse_unknown_options(arguments: list[str], options: dict[str, bool], command: Any) -> None:
    """Raises ConfigError for options that the command lacks, of several one that names all."""
    known = {
        flag: str(getattr(option, "help", "") or "")
        for option in command.params
        for flag in option.opts
        if flag.startswith("--")
    }
    path = f"moebius {arguments[0]}"
    if problems := unknown_options(arguments[1:], options, known, path):
        raise all_problems(problems, f"{len(problems)} options do not exist" if len(problems) > 1 else "")


def name_of(command: typer.models.CommandInfo) -> str:
    """Returns the command's word on the command line."""
    return command.name or typer.main.get_command_name(getattr(command.callback, "__name__", ""))


def _run(arguments: list[str]) -> object:
    command = _command(arguments[0] if arguments else "")
    chosen = getattr(command, "commands", {}).get(arguments[0]) if arguments else None
    if not arguments or (len(arguments) == 1 and hasattr(chosen, "commands")):
        arguments = [*arguments, "--help"]  # of the whole, or of a group: its commands
    if HELP_ALL in arguments and isinstance(chosen, GroupedHelp):
        chosen.shows_all = True
        arguments = ["--help" if word == HELP_ALL else word for word in arguments]
    options = {
        name: not getattr(parameter, "is_flag", False)
        for parameter in getattr(chosen, "params", ())
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    if "--config" in options:  # it takes settings
        note_variables(os.environ)
        options |= {"-h": False, "--help": False}
        arguments = [arguments[0], *translated(arguments[1:], options, command=arguments[0])]
        refuse_unknown_options(arguments, options, chosen)
    return command(args=arguments, prog_name="moebius", standalone_mode=False)
