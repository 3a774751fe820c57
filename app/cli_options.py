"""Turns the configuration tree into command-line options.

A command is written as a plain function that takes `config: MoebiusConfig` and arguments of its own;
`with_settings` gives it one option per leaf of the named sections. Options arrive as texts and are
parsed and checked by `moebius.config.loader`, so a flag and a YAML key are judged by the same rules and give
the same messages.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from moebius.config import MoebiusConfig
from moebius.config.loader import Leaf, leaves, load_config, models_of, printable_config
from moebius.errors import UserError
from moebius.process.limits import check_limits

PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the effective configuration, all settings, at start-up")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results there as JSON, too")
]
# Of clients of a running server.
BaseUrl = Annotated[str, typer.Option("--base-url", "--url", help="Running server")]
ModelName = Annotated[str, typer.Option("--model", help="Model name [default: the server's first]")]
ApiKey = Annotated[str, typer.Option(help="Bearer token (shows in `ps`)")]
ApiKeyFile = Annotated[str, typer.Option(help="File whose first key is the bearer token", metavar="FILE")]
CaFile = Annotated[
    str, typer.Option(help="CA certificates by which an https server is checked", metavar="FILE")
]
ClientCertFile = Annotated[
    str, typer.Option(help="Certificate for an https server that wants one", metavar="FILE")
]
ClientKeyFile = Annotated[str, typer.Option(help="Private key of that certificate", metavar="FILE")]
# Of commands that look at a running engine, through its gateway or not.
LiveServer = Annotated[
    str,
    typer.Argument(
        metavar="URL|PORT",
        help="Gateway, or an engine's gRPC address (unix:PATH) [default: the only server here, or port 8000]",
        show_default=False,
    ),
]
# Of commands that ask a running gateway.
GatewayServer = Annotated[
    str,
    typer.Argument(
        metavar="URL|PORT|MODEL",
        help="Gateway [default: the only server here, or port 8000]",
        show_default=False,
    ),
]
LookInterval = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks")]
ReplicaIndex = Annotated[int, typer.Option(min=0, help="Of several engines behind it, from 0")]
SecurityFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="YAML file whose section `security` says how gRPC is reached"),
]
# The first argument of most commands, not an option.
MODEL_LEAF = "model"
DEVICES = Path("/dev")


def print_configuration(config: MoebiusConfig) -> None:
    """Every setting with its value on stderr, as YAML that `--config` reads."""
    print(printable_config(config), file=sys.stderr, flush=True)


def parse_counts(text: str, option: str, most: int = 9_999_999) -> list[int]:
    """Returns comma-separated numbers from 1 to `most`. Raises UserError naming `option`."""
    if re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        counts = [int(part) for part in text.split(",")]
        if max(counts) <= most:
            return counts
    raise UserError(f"{option}: {text!r} is not allowed; allowed: numbers from 1 to {most}, comma separated")


def log_warnings_only(process: str) -> None:
    """Leaves stderr to warnings and to phases of a start that take longer than moments, as compiling does."""
    from moebius.config import TelemetryConfig
    from moebius.process import progress
    from moebius.telemetry import configure_logging

    configure_logging(TelemetryConfig(log_level="warning"), process)
    logging.getLogger(progress.__name__).setLevel(logging.INFO)


def with_settings(
    *names: str,
    model_argument: bool = True,
    needs_device: bool = False,
    several: Callable[[str, dict[str, Any], dict[str, Any]], None] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that replaces the parameter `config` by `--config FILE` and one option per leaf.

    `names` limits the options to sections and single leaves (all when empty); a YAML file may hold the whole
    tree in any case. With `model_argument` the leaf `model` is the positional argument MODEL. With
    `needs_device` too low limits of the process, and a GPU that is asked for and not there, are refused
    before the command imports anything, unless it was given `--dry-run`. `several` is called in place of the
    command, with the file, the options given and the command's own, where the file has `models`; MODEL may
    then be that file.
    """
    chosen = [leaf for leaf in leaves() if not names or leaf.section in names or leaf.name in names]
    options = [leaf for leaf in chosen if leaf.name != MODEL_LEAF]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(function, eval_str=True).parameters.values()
            if parameter.name != "config"
        ]

        @functools.wraps(function)
        def command(**values: Any) -> None:
            own_values = {parameter.name: values.pop(parameter.name) for parameter in own}
            path = values.pop("config_file")
            if several is not None and (models_file := _models_file(path, values)):
                several(models_file, values, own_values)
                return
            config = load_config(path, values)
            if needs_device and not own_values.get("dry_run"):
                check_limits("gpu")
                check_device(config)
            function(config=config, **own_values)

        parameters = [*_model_parameter(model_argument), *own, _config_parameter()]
        parameters += [_option_parameter(leaf) for leaf in options]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _models_file(path: str | None, values: dict[str, Any]) -> str | None:
    """Returns the configuration file with several models, from --config or MODEL, which is then taken out.

    Raises ConfigError for a file that is none.
    """
    model = values.get(MODEL_LEAF) or ""
    if path is None and model.endswith((".yaml", ".yml")) and Path(model).is_file():
        if not models_of(model):
            raise UserError(
                f"{model} has no `models`; a file with the settings of one is given with --config"
            )
        values[MODEL_LEAF] = None
        return str(model)
    return path if path is not None and models_of(path) else None


def check_device(config: MoebiusConfig) -> None:
    """Refuses a GPU that is not there before anything is loaded. Raises UserError."""
    # NVIDIA's driver on Linux, and below Windows.
    found = any(DEVICES.glob("nvidia[0-9]*")) or (DEVICES / "dxg").exists()
    if config.gpu.device == "cuda" and not found:
        raise UserError(
            "--device cuda: there is no NVIDIA GPU here (no /dev/nvidia0; does nvidia-smi list one?); "
            "--device auto takes the CPU then"
        )


def _model_parameter(wanted: bool) -> list[inspect.Parameter]:
    if not wanted:
        return []
    help_text = (
        "Checkpoint directory in Hugging Face format, GGUF file, name on the Hugging Face hub (owner/name) "
        "or short name of a recipe (qwen3-coder-30b), or `demo` for the demo model"
    )
    annotation = Annotated[str | None, typer.Argument(metavar="MODEL", help=help_text)]
    return [_keyword(MODEL_LEAF, annotation)]


def _config_parameter() -> inspect.Parameter:
    option = typer.Option("--config", metavar="FILE", help="YAML file with any of the settings below")
    return _keyword("config_file", Annotated[str | None, option])


@functools.cache  # commands share them: there are thousands otherwise, in a twentieth of a second and more
def _option_parameter(leaf: Leaf) -> inspect.Parameter:
    """Returns one leaf as an option whose default is "not given"."""
    help_text = f"{leaf.description} [default: {leaf.default_text}]"
    if leaf.annotation is bool:
        option = typer.Option(
            f"{leaf.flag}/--no-{leaf.flag[2:]}", help=help_text, rich_help_panel=leaf.section
        )
        return _keyword(leaf.name, Annotated[bool | None, option])
    option = typer.Option(leaf.flag, help=help_text, metavar=leaf.metavar, rich_help_panel=leaf.section)
    return _keyword(leaf.name, Annotated[str | None, option])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
