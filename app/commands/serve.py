"""`moebius serve MODEL`: the whole system until a signal; `gateway|gpu|expert`: a process of it alone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli_options import MODEL_LEAF, PrintConfig, print_configuration, with_settings
from app.commands.models import check_files, with_checkpoint
from moebius.config import MoebiusConfig
from moebius.config.leaves import leaves
from moebius.network.web_origins import LOOPBACK_HOSTS
from moebius.process.limits import check_limits

if TYPE_CHECKING:
    from app.supervisor.plan import ServePlan

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the memory plan and whether it fits; start nothing")
]
OF_ENGINES = ("model", "images", "gpu", "experts", "parallel", "placement", "security", "telemetry")
QUESTION = "What is the capital of France?"


# Which experts servers hold besides those of the model's own layers.
OF_MTP = ("speculative_method", "num_draft_tokens")


def register(app: typer.Typer) -> None:
    """Adds the five commands."""
    _add_services(app)
    _add_engines(app)

    @app.command()
    @with_settings(needs_device=True, several=_serve_several)
    def serve(config: MoebiusConfig, dry_run: DryRun = False, print_config: PrintConfig = False) -> None:
        """Start all processes of a model, and keep them running."""
        import structlog

        from app.commands.running import running
        from app.supervisor.early import EarlyChildren
        from moebius.network.api_keys import ApiKeys
        from moebius.telemetry import configure_logging

        asked, config = config, checked(config, dry_run)
        if dry_run:
            print_dry_run(config, asked)
            return
        configure_logging(config.telemetry, "supervisor")
        keys = ApiKeys(config.gateway.api_key, config.gateway.api_key_file)
        with contextlib.ExitStack() as stack:
            # Before there are threads, and locks on files.
            early = stack.enter_context(EarlyChildren(config))
            serve_plan = planned(config)
            if print_config:
                print_configuration(serve_plan.config)
            supervisor = stack.enter_context(running(serve_plan, early))
            if not supervisor.stopping:
                name = serve_plan.config.model.served_model_name
                if serve_plan.plan.json_logs:
                    structlog.get_logger(__name__).info("ready", model=name, base_url=serve_plan.base_url)
                else:
                    print(examples(serve_plan.base_url, name, keys.required), flush=True)
                    print(container_note(serve_plan.config.gateway.host), end="", flush=True)
            supervisor.run()


def checked(config: MoebiusConfig, dry_run: bool) -> MoebiusConfig:
    """Returns the configuration with MODEL's files found, once nothing that it names is missing or wrong.

    Raises UserError or CheckpointError, of several problems one that names all: model and its files,
    certificates, API keys.
    """
    from app.problems import Problems
    from moebius.network.api_keys import ApiKeys
    from moebius.network.tls import configure_tls

    problems = Problems()
    with problems.collected():
        configure_tls(config.security)
    with problems.collected():
        ApiKeys(config.gateway.api_key, config.gateway.api_key_file)
    with problems.collected():
        # A download of hours is not begun for what is refused afterwards.
        found = with_checkpoint(config, needs_weights=not dry_run and not problems)
        check_files(found, needs_weights=not dry_run and not problems)
    problems.refuse()
    return found


def planned(config: MoebiusConfig) -> ServePlan:
    """Returns the processes of a model. Raises what `plan_processes` does."""
    from app.planning.fill import with_filled_gpus
    from app.supervisor.plan import plan_processes

    return plan_processes(with_filled_gpus(config))


def _serve_several(path: str, flags: dict[str, Any], own: dict[str, Any]) -> None:
    from app.swap.run import serve_models

    serve_models(path, flags, dry_run=bool(own["dry_run"]))


def serve_options() -> dict[str, bool]:
    """Returns the options of `moebius serve`, and whether each takes a value."""
    return {
        spelling: leaf.annotation is not bool
        for leaf in leaves()
        if leaf.name != MODEL_LEAF
        for spelling in (leaf.flag, f"--no-{leaf.flag[2:]}")[: 2 if leaf.annotation is bool else 1]
    } | {"--config": True, "--dry-run": False, "--print-config": False}


def print_dry_run(config: MoebiusConfig, asked: MoebiusConfig) -> None:
    """Prints the plan of `moebius plan` for this machine; `asked`: before MODEL's files were found.

    Raises typer.Exit when it does not fit here.
    """
    from app.planning.capacity import Wish
    from app.planning.hardware import HardwareOptions
    from app.planning.report import run

    run(config, asked, HardwareOptions(), Wish(), fill=True)


def examples(base_url: str, model: str, needs_key: bool) -> str:
    """Returns a curl and a Python example that work as pasted (with the reader's own key when one
    is needed).
    """
    header = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    key = "YOUR_KEY" if needs_key else "none"
    return f"""
Ready: {model} on {base_url}/v1   (Ctrl-C stops)

curl {base_url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "{QUESTION}"}}], "temperature": 0}}'

from openai import OpenAI

client = OpenAI(base_url="{base_url}/v1", api_key="{key}")
stream = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "{QUESTION}"}}],
    temperature=0,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
"""


def container_note(host: str, root: Path = Path("/")) -> str:
    """Returns what a published port needs, for a server that only its container reaches; else empty."""
    inside = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    if not inside or host not in LOOPBACK_HOSTS:
        return ""
    return (
        f"Only this container reaches {host}; a port that docker or podman publishes needs --host 0.0.0.0\n"
    )


def _add_services(app: typer.Typer) -> None:
    @app.command()
    @with_settings("model", "images", "gateway", "security", "telemetry")
    def gateway(config: MoebiusConfig, print_config: PrintConfig = False) -> None:
        """Run the HTTP process alone. It serves the engine at --engine-address."""
        check_limits("gateway")
        config = _prepared(config, print_config)
        from gateway.main import run

        raise typer.Exit(run(config))

    @app.command()
    @with_settings("model", "experts", "placement", "security", "telemetry", *OF_MTP)
    def expert(config: MoebiusConfig, print_config: PrintConfig = False) -> None:
        """Run one expert server alone. Its share: --split-index of --split-count.

        What the placement settings put on GPUs is left out; the engine needs the same settings. With
        --speculative-method mtp the experts of MTP layers are held, too.
        Without MODEL it waits for a gRPC Expert.Load.
        """
        check_limits("expert")
        config = _prepared(config, print_config, needs_model=False)
        from expert_service.main import run

        raise typer.Exit(run(config))


def _add_engines(app: typer.Typer) -> None:
    @app.command()
    @with_settings(*OF_ENGINES, needs_device=True)
    def gpu(config: MoebiusConfig, print_config: PrintConfig = False) -> None:
        """Run one engine process alone, --rank N of several. It finds experts as --expert-transport says."""
        from app.supervisor.prefix_memory import with_prefix_memory_of_engine

        config = with_prefix_memory_of_engine(_prepared(config, print_config))
        from gpu_service.main import run

        raise typer.Exit(run(config))

    @app.command()
    @with_settings(
        *(
            "model",
            "images",
            "gpu",
            "experts",
            "parallel",
            "placement",
            "supervisor",
            "security",
            "telemetry",
        ),
        needs_device=True,
    )
    def ranks(config: MoebiusConfig, print_config: PrintConfig = False) -> None:
        """Run an engine's ranks of this host, and restart them. The hosts: --rank-hosts, --host-index.

        Expert servers and the gateway are started by others, as for `moebius gpu`.
        """
        from app.commands.running import running
        from app.supervisor.plan import plan_ranks
        from moebius.network.tls import configure_tls
        from moebius.telemetry import configure_logging

        config = _prepared(config, print_config)
        configure_tls(config.security)
        configure_logging(config.telemetry, "supervisor")
        with running(plan_ranks(config)) as supervisor:
            supervisor.run()


def _prepared(config: MoebiusConfig, print_config: bool, needs_model: bool = True) -> MoebiusConfig:
    """Checks the model; prints the effective configuration if asked.

    A process that is started alone has no layers of multi-token prediction unless `mtp` is set, since what
    the others have room for is not known to it.
    """
    if needs_model or config.model.model:
        config = with_checkpoint(config)
    if config.gpu.speculative_method == "auto" and config.gpu.speculative_model:
        from moebius.models.served import with_drafts

        config = with_drafts(config)
    if print_config:
        print_configuration(config)
    return config
