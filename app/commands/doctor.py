"""`moebius doctor`: what this host, or a Pod's node, lacks to serve fast, and what provides it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli_options import JsonFile, with_settings
from moebius.config import MoebiusConfig
from moebius.errors import UserError

if TYPE_CHECKING:
    from app.doctor.checks import Expectation, Finding
    from app.doctor.facts import Facts
    from app.planning.capacity import CapacityPlan
    from app.supervisor.shortages import Shortage

MIB = 2**20
MARKS = {"ok": "ok     ", "warning": "warning", "failure": "FAILURE"}
IN_A_POD = "chart values model.path and model.source, mounted at /models"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(doctor)


@with_settings("model", "gpu", "experts", "parallel", "placement")
def doctor(
    config: MoebiusConfig,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Judge what a Pod needs; failures end with status 1")
    ] = False,
    role: Annotated[
        str,
        typer.Option(help="engine, expert (init containers of such Pods), or server (in one's container)"),
    ] = "engine",
    expect_gpus: Annotated[int, typer.Option(help="GPUs that the Pod was given", min=0)] = 0,
    expect_weights_mib: Annotated[
        int, typer.Option(help="Size of the volume for packed experts; 0: no volume", min=0)
    ] = 0,
    kubelet_config: Annotated[
        Path | None,
        typer.Option(help="The node's KubeletConfiguration, where it can be read", metavar="FILE"),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure again what each NUMA node's memory gives, and remember it; try how much memory can "
            "be page-locked for a GPU",
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings end with status 1, too")] = False,
    json_file: JsonFile = None,
) -> None:
    """Say what this host lacks to serve fast, and what helps. Exit status 1: a failure."""
    from app.bench.output import write_json
    from app.doctor.checks import check_host
    from app.doctor.facts import read_facts
    from app.doctor.machine_checks import with_effects

    if role not in ("engine", "expert", "server"):
        raise UserError(f"--role: {role!r} is not allowed; allowed: engine, expert, server")
    try:
        facts = read_facts()
    except (RuntimeError, ValueError) as error:
        raise UserError(str(error)) from None
    measured = [*_measured(config), *_measured_gpus(facts)] if measure else []
    findings = [*check_host(facts), *_machine_findings(config, facts), _limits(role), *measured]
    if kubernetes:
        expected, checkpoint = _expectation(config, role, expect_gpus, expect_weights_mib)
        findings += [*checkpoint, *_pod_findings(config, facts, expected, kubelet_config)]
    else:
        findings += _thread_findings(config)
        if config.model.model:
            of_model, plans = _model_findings(config, facts)
            findings = [*(with_effects(findings, *plans) if plans else findings), *of_model]
    for finding in findings:
        print(line_of(finding))
    statuses = [finding.status for finding in findings]
    write_json({"findings": [asdict(each) for each in findings], "ok": "failure" not in statuses}, json_file)
    if "failure" in statuses or (strict and "warning" in statuses):
        raise typer.Exit(1)


def line_of(finding: Finding) -> str:
    """Returns the line of a finding as it is printed."""
    text = f"{MARKS[finding.status]} {finding.check}: {finding.found}"
    return f"{text}; {finding.fix}" if finding.fix else text


def _expectation(
    config: MoebiusConfig, role: Literal["engine", "expert", "server"] | str, gpus: int, weights_mib: int
) -> tuple[Expectation, list[Finding]]:
    """Returns what the configuration says that the Pod holds, and whether its checkpoint can be used."""
    from app.commands.models import with_checkpoint
    from app.doctor.checks import Expectation, check_model

    experts, hosts = config.experts, config.parallel.rank_hosts
    servers = experts.split_count // hosts if experts.expert_servers and not experts.expert_addresses else 0
    if role != "engine":
        servers = 1
    values: dict[str, Any] = {"gpus": gpus, "servers": servers, "numa_node": experts.numa_node}
    values |= {"own_cpus": role == "server", "weights_bytes": weights_mib * MIB}
    if not config.model.model:
        return Expectation(**values), []
    error = ""
    try:
        config = with_checkpoint(config)
        values |= _sizes(config, role)
    except (UserError, ValueError, OSError) as found:
        error = str(found)
    return Expectation(**values), [check_model(config.model.model, error, IN_A_POD)]


def _thread_findings(config: MoebiusConfig) -> list[Finding]:
    """Returns on which cores an instance that starts now computes, and why there are as many threads."""
    from app.doctor.checks import Finding, check_threads
    from app.supervisor.core_division import divided_cores
    from app.supervisor.plan import place_servers

    try:
        with divided_cores(config.experts, measures=False) as division:
            return list(check_threads(place_servers(config, division.cores)))
    except UserError as error:
        return [Finding("expert threads", "failure", str(error), "`moebius serve` would refuse it, too")]


def _limits(role: str) -> Finding:
    """Returns whether a process may start at all: what every command checks that starts one."""
    from app.doctor.checks import check_process_limits
    from moebius.process.limits import check_limits

    try:
        check_limits("gpu" if role == "engine" else "expert")
    except UserError as error:
        return check_process_limits(str(error))
    return check_process_limits("")


def _machine_findings(config: MoebiusConfig, facts: Facts) -> list[Finding]:
    """Returns what is known of processors, memory and versions of libraries."""
    from app.doctor.machine_checks import check_machine, check_versions, read_versions
    from app.supervisor.core_division import known_cores

    curves = {node: found.curve for node, found in known_cores(config.experts).nodes.items()}
    bandwidth = {node: curve.best for node, curve in curves.items() if curve is not None}
    versions = check_versions(read_versions(), facts.driver)
    return [*check_machine(facts, bandwidth if len(bandwidth) == len(curves) else {}), versions]


Plans = tuple["CapacityPlan", "CapacityPlan"] | None


def _model_findings(config: MoebiusConfig, facts: Facts) -> tuple[list[Finding], Plans]:
    """Returns whether `moebius serve MODEL` would start here: files, then sizes, then the memory plan. With
    it come the plans that `with_effects` compares, where there are any.
    """
    from app.commands.models import check_files, with_checkpoint
    from app.doctor.checks import check_model, check_plan, check_shortages
    from app.planning.fill import with_filled_gpus

    given, error = config.model.model, ""
    try:
        config = with_checkpoint(config, needs_weights=False)
        check_files(config, needs_weights=False)
    except (UserError, ValueError, OSError) as found:
        error = str(found)
    findings = [check_model(given, error, "`moebius plan` takes the same MODEL, and says more")]
    if error:
        return findings, None
    try:
        # As `serve` does: what it puts on GPUs by itself needs no RAM.
        config = with_filled_gpus(config)
        shortages = _shortages(config)
    except (UserError, ValueError) as found:
        return [*findings, check_plan(str(found))], None
    findings += check_shortages(shortages)
    # Its estimate says the same once more, and less of the cause.
    if shortages:
        return findings, None
    finding, plans = _memory_plan(config, facts)
    return [*findings, finding], plans


def _shortages(config: MoebiusConfig) -> list[Shortage]:
    """Returns the shortages as `moebius serve` finds them.

    Raises UserError or ValueError for settings that cannot be.
    """
    from app.cli_options import check_device
    from app.supervisor.core_division import known_cores
    from app.supervisor.plan import expert_placements
    from app.supervisor.shortages import find_shortages, needs_of
    from moebius.models.served import read_served_geometry

    check_device(config)
    model = read_served_geometry(config)
    count = len(expert_placements(config, model, known_cores(config.experts)))
    uses_mailbox = count > 0 and config.experts.expert_transport == "mailbox"
    changed = {
        "expert_servers": count,
        "split_count": max(1, count),
        "mailbox": (config.experts.mailbox or "moebius") if uses_mailbox else "",
    }
    planned = config.model_copy(update={"experts": config.experts.model_copy(update=changed)})
    return list(find_shortages(needs_of(config, planned, model), config.experts.expert_weights_dir))


def _memory_plan(config: MoebiusConfig, facts: Facts) -> tuple[Finding, Plans]:
    """What `moebius serve --dry-run` says of the memory that is free now, and the plans, if it fits."""
    from app.doctor.checks import check_plan
    from app.doctor.machine_checks import seen_link
    from app.planning.capacity import Wish
    from app.planning.fill import with_free_memory
    from app.planning.gpu_use import plan_capacity
    from app.planning.hardware import HardwareOptions, hardware
    from app.planning.report import expectation, quiet

    if config.experts.expert_transport == "local":
        return check_plan("", "none for expert_transport local"), None
    try:
        with quiet():
            host = with_free_memory(hardware(HardwareOptions()), config.gpu)
            full = seen = plan_capacity(config, host, Wish(), fill=False)
            if host.gpu is not None and seen_link(facts.gpu_links) < 1:
                gpu = replace(host.gpu, link=host.gpu.link * seen_link(facts.gpu_links))
                seen = plan_capacity(config, replace(host, gpu=gpu), Wish(), fill=False)
    except (UserError, ValueError) as error:
        return check_plan(" ".join(str(error).split())), None
    return check_plan("", f"fits; {expectation(seen)}"), (full, seen)


def _sizes(config: MoebiusConfig, role: str) -> dict[str, Any]:
    """The planner's own numbers: the mailbox, and packed experts of the Pod's servers."""
    from app.planning.memory import segment_bytes
    from moebius.mailbox.plan import mailbox_geometry
    from moebius.models.served import read_served_geometry

    experts = config.experts
    geometry = read_served_geometry(config)
    values: dict[str, Any] = {}
    if experts.mailbox:
        values["mailbox_bytes"] = mailbox_geometry(config, geometry).regions().total
    if experts.expert_weights_dir and experts.expert_servers:
        everything = segment_bytes(config, geometry, experts.split_count)
        here = len(everything) // config.parallel.rank_hosts if role == "engine" else 1
        # Hosts and remote servers have different shares: the largest ones have to fit.
        values["segments"] = tuple(sorted(everything)[-here:])
    return values


def _pod_findings(
    config: MoebiusConfig, facts: Facts, expected: Expectation, kubelet_config: Path | None
) -> list[Finding]:
    from app.doctor.checks import check_certificates, check_kubelet, check_pod
    from app.doctor.facts import read_volume
    from moebius.config.loader import read_yaml
    from moebius.mailbox import SHARED_MEMORY

    directory = config.experts.expert_weights_dir
    weights = read_volume(Path(directory)) if directory and expected.servers else None
    places = [read_volume(Path(place)) for place in (config.supervisor.state_dir, "/tmp") if place]
    findings = list(check_pod(facts, expected, read_volume(SHARED_MEMORY), weights, places))
    findings += check_certificates(config.security)
    if kubelet_config is not None:
        findings += check_kubelet(read_yaml(kubelet_config), expected)
    return findings


def _measured_gpus(facts: Facts) -> list[Finding]:
    """How much of the memory that is free can be page-locked, tried as an engine tries it."""
    if not facts.num_gpus:
        return []
    from app.doctor.checks import Finding
    from app.doctor.machine_checks import check_pinned
    from gpu_service.device.pinned import limit_of_first_gpu
    from moebius.process.limits import available_memory

    wanted = available_memory() * 3 // 4
    try:
        return [check_pinned(limit_of_first_gpu(wanted), wanted)]
    except RuntimeError as error:
        return [Finding("page-locked memory", "warning", f"not tried: {error}")]


def _measured(config: MoebiusConfig) -> list[Finding]:
    """How fast each node's memory is read by how many of its cores. `serve` uses it from then on."""
    from app.doctor.checks import Finding
    from app.supervisor.core_division import known_cores, measure_cores

    try:
        cores = known_cores(config.experts)
        curves = measure_cores(cores.nodes, cores.quota)
    except (UserError, OSError, ValueError, MemoryError) as error:
        return [
            Finding("memory bandwidth", "warning", f"not measured: {error}", "all cores compute until it is")
        ]
    return [
        Finding(
            f"memory of node {max(0, node)}",
            "ok",
            f"{curve.best / 1e9:.1f} GB/s, read by {curve.knee} threads or more (GB/s by threads: {curve})",
        )
        for node, curve in curves.items()
    ]
