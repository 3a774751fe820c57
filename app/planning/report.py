"""What `moebius plan` and `moebius serve --dry-run` print and write."""

from __future__ import annotations

import logging
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import structlog
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from app.bench.output import write_json
from app.cli_options import MODEL_LEAF
from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.chart_values import chart_values, write_values
from app.planning.cold import cost
from app.planning.completeness import refuse_incomplete
from app.planning.drafts import decided_drafts
from app.planning.fill import with_free_memory
from app.planning.gpu_use import plan_capacity
from app.planning.hardware import Hardware, HardwareOptions, hardware
from app.planning.measured_products import with_measured_products
from app.planning.smallest_change import smaller_quantisation, smallest_change
from app.planning.speed import ASSUMED_EXPERT_BANDWIDTH_SHARE, Speed
from moebius.config import MoebiusConfig
from moebius.config.loader import SECRET_LEAVES, leaves
from moebius.errors import UserError
from moebius.models.served import with_method

GIB = 2**30
FORMULA = (
    "step = (dense + KV bytes) / bandwidth + max(experts in RAM, experts on GPUs) + hand-offs + launches; "
    "experts: E (1 - (1 - k/E)^n) different ones of n rows, each as long as its kernels were measured to "
    f"take or, where that is assumed, bytes / ({ASSUMED_EXPERT_BANDWIDTH_SHARE} bandwidth) + operations / "
    "a share of the peak; of prompts experts are streamed where that is faster"
)


def print_plan(plan: CapacityPlan, command: str, console: Console | None = None) -> None:
    """Memory, KV cache, residency, the command that serves so, speed, notes."""
    console = console or Console()
    console.print(f"[bold]{plan.model}[/] ({plan.model_type}): {hardware_line(plan)}", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in plan.settings.items()), highlight=False)
    console.print(_memory(plan))
    for line in summary(plan):
        console.print(line, highlight=False)
    # Whole, however narrow the terminal: it is copied.
    console.print(f"serve with: {command}", highlight=False, soft_wrap=True)
    console.print(expectation(plan), highlight=False)
    console.print(_speeds(plan))
    console.print(FORMULA, style="dim", highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", style="dim", highlight=False)


def hardware_line(plan: CapacityPlan) -> str:
    """Returns what is planned for, each number with where it comes from."""
    found, of = plan.hardware, plan.hardware.origin
    parts = []
    if found.gpu is not None:
        each = Counter(found.rank_gpus(found.gpus))
        parts += [
            f"{count} x {gpu.name} ({gpu.memory_bytes / GIB:.1f} GiB, {gpu.bandwidth / 1e9:.0f} GB/s, "
            f"{gpu.flops / 1e12:.0f} TFLOP/s, link {gpu.link / 1e9:.0f} GB/s; {of.get('gpu', 'given')})"
            for gpu, count in each.items()
        ]
    parts.append(f"{found.ram_bytes / GIB:.1f} GiB RAM ({of.get('ram', 'given')})")
    parts.append(f"{found.sockets} NUMA node(s), {found.cores} cores, {found.isa}")
    parts.append(f"{found.bandwidth / 1e9:.0f} GB/s ({of.get('bandwidth', 'given')})")
    parts.append(f"{found.cpu_flops / 1e12:.1f} TFLOP/s on CPUs ({of.get('cpu_flops', 'given')})")
    return ", ".join(parts)


def summary(plan: CapacityPlan) -> list[str]:
    """Returns lines on KV cache, residency and where the kernels' times are from."""
    kv, held = plan.kv, plan.residency
    lines = [
        f"KV cache: {kv.tokens} tokens of {kv.token_bytes / 1024:.1f} KiB on the fullest rank: "
        f"{kv.tokens // plan.context} streams of {plan.context} tokens"
    ]
    for window, share in kv.windows.items():
        size = f"{share * kv.token_bytes / 1024:.1f} KiB of a token"
        lines.append(f"{size} are read by the next {window} only, and kept as long as the rest")
    everything = held.num_experts * len(held.by_layer)
    how = "as many as fit" if held.is_filled else "as set"
    ranks, split = plan.settings["tensor_parallel_size"], plan.settings["gpu_expert_split"]
    if ranks != "1" and held.count:
        how += f", {'each rank other ones' if split == 'expert' else 'each rank channels of all'}"
    lines.append(f"experts on GPUs: {held.count} of {everything} ({held.share:.1%}, {how})")
    if plan.cold is not None:
        lines.append(
            f"experts on disk: {plan.cold.file_bytes / GIB:.2f} GiB packed, of which RAM holds "
            f"{plan.cold.memory_bytes / GIB:.2f} GiB; {cost(plan.cold)}"
        )
    if plan.dense is not None:
        lines.append(f"dense weights: {plan.dense.line}")
    lines.append(f"times of the expert kernels: {plan.expert_kernels}")
    return lines


def expectation(plan: CapacityPlan) -> str:
    """Returns what the command is expected to do: when it is ready, and how fast it answers."""
    one = plan.decode[0]
    streams = "one stream" if one.rows == 1 else f"{one.rows} streams"
    compiling = "; compiling kernels, once on a machine, takes minutes" if plan.hardware.gpu else ""
    return (
        f"expected: ready after about {plan.start_seconds:.0f} s{compiling}; {one.tokens_per_second:.1f} "
        f"tokens/s for {streams}, prompts {plan.prefill.tokens_per_second:.0f} tokens/s"
    )


def serve_command(asked: MoebiusConfig, plan: CapacityPlan) -> str:
    """Returns what does on such hardware what was planned: the settings that were given, then those that were
    found.

    `asked`: as the user gave it, before names were resolved and anything was decided. Secrets are left out.
    """
    found, given = plan.serve_flags.split(), list[str]()
    for leaf in leaves():
        value = getattr(getattr(asked, leaf.section), leaf.name)
        is_shown = leaf.name != MODEL_LEAF and leaf.name not in SECRET_LEAVES
        if is_shown and value != leaf.default and leaf.flag not in found:
            given += leaf.arguments(value)
    return shlex.join(["moebius", "serve", asked.model.model, *given, *found])


def _memory(plan: CapacityPlan) -> Table:
    table = Table("place", "part", title="Memory, GiB", title_justify="left", box=SIMPLE)
    table.add_column("GiB", justify="right")
    for place in plan.places:
        for part in plan.components:
            if part.place == place:
                node = f" (node {part.node})" if part.node >= 0 else ""
                table.add_row(place, part.part + node, f"{part.nbytes / GIB:.2f}")
        total, budget = plan.total_of(place), plan.budgets[place]
        table.add_row(place, "[bold]sum[/]", f"[bold]{total / GIB:.2f}[/]")
        table.add_row(place, "planned with", f"{budget / GIB:.2f}", end_section=True)
    return table


def _speeds(plan: CapacityPlan) -> Table:
    title = f"Predicted at {plan.context} tokens of context; parts of a step in ms"
    table = Table(title=title, title_justify="left", box=SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("tokens/s", "step", "experts", "dense", "in RAM", "on GPU", "handoff", "rest"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.decode:
        beyond = "*" if row.rows * plan.context > plan.kv.tokens else ""
        table.add_row(f"decode {row.rows}{beyond}", *_cells(row))
    table.add_row(f"prefill {plan.prefill.rows}", *_cells(plan.prefill))
    if plan.decode[-1].rows * plan.context > plan.kv.tokens:
        table.caption = "* more streams of that context than the KV cache holds"
    return table


def _cells(row: Speed) -> list[str]:
    """Returns the longest part of the step in bold."""
    seconds = row.seconds
    parts = seconds.parts
    cells = [_milliseconds(part) for part in parts.values()]
    longest = list(parts).index(seconds.bound_by)
    cells[longest] = f"[bold]{cells[longest]}[/]"
    head = [f"{row.tokens_per_second:.1f}", _milliseconds(seconds.total), f"{row.distinct_experts:.1f}"]
    return [*head, *cells]


def _milliseconds(seconds: float) -> str:
    """Returns formats a number narrow enough for nine columns on a terminal."""
    return f"{seconds * 1e3:.{2 if seconds < 0.1 else 0}f}"


def document(plan: CapacityPlan, command: str) -> dict[str, Any]:
    """Returns all fields, and what follows from them: sums, and the command that serves so; bytes,
    seconds.
    """
    found = asdict(plan)
    found["total"] = plan.total
    found["totals"] = {place: plan.total_of(place) for place in plan.places}
    found["kv"]["tokens"] = plan.kv.tokens
    held = plan.residency
    found["residency"] |= {"count": held.count, "share": held.share, "by_layer": held.by_layer}
    found["decode"] = [_speed(row) for row in plan.decode]
    found["prefill"] = _speed(plan.prefill)
    found["serve_flags"], found["serve_command"] = plan.serve_flags, command
    return found


def _speed(row: Speed) -> dict[str, Any]:
    found = asdict(row)
    found["seconds"] |= {"total": row.seconds.total, "bound_by": row.seconds.bound_by}
    return found


EXIT_DOES_NOT_FIT = 1


def run(
    config: MoebiusConfig,
    asked: MoebiusConfig,
    options: HardwareOptions,
    wish: Wish,
    fill: bool,
    json_file: Path | None = None,
    values_file: Path | None = None,
) -> CapacityPlan:
    """Prints the plan and writes it, if asked, as JSON and as values of the Helm chart.

    `asked`: as `serve_command` has it; `config`: with MODEL's files found.
    Raises typer.Exit with status 1, after one line on stderr, when it does not fit; UserError for all else.
    """
    try:
        with quiet():
            host = hardware(options)
            if options.gpus == "auto" and options.gpu_memory_gib is None:
                host = with_free_memory(host, config.gpu)
            refuse_incomplete(config)
            if options.measure:
                host = with_measured_products(config, host)
            config, asked, note = _with_drafts(config, asked, host, wish, fill)
            found = plan_capacity(config, host, wish, fill)
    except DoesNotFit as error:
        with quiet():
            remedy = what_fits(config, asked, host, wish, fill)
        print(f"moebius: does not fit: {' '.join(str(error).split())}; {remedy}", file=sys.stderr)
        raise typer.Exit(EXIT_DOES_NOT_FIT) from error
    found = replace(found, notes=(*found.notes, *note))
    command = serve_command(asked, found)
    print_plan(found, command)
    if json_file is not None:
        write_json(document(found, command), json_file)
    if values_file is not None:
        if found.cold is not None:
            raise UserError("--values: the chart keeps experts in RAM; allowed: --cold-experts ram")
        write_values(values_file, chart_values(config, found), f"{found.model} on {hardware_line(found)}")
    return found


def _with_drafts(
    config: MoebiusConfig, asked: MoebiusConfig, host: Hardware, wish: Wish, fill: bool
) -> tuple[MoebiusConfig, MoebiusConfig, tuple[str, ...]]:
    """Returns both settings with what `speculative_method` auto becomes, and a note where it is decided."""

    def planned(each: MoebiusConfig) -> CapacityPlan:
        return plan_capacity(each, host, wish, fill, explain=False)

    decided, reason = decided_drafts(config, planned, wish)
    method = decided.gpu.speculative_method
    if method == config.gpu.speculative_method:
        return config, asked, ()
    why = f": {reason}" if reason else ", the method of the model's own layers"
    return decided, with_method(asked, method), (f"speculative_method auto is {method} here{why}",)


def what_fits(config: MoebiusConfig, asked: MoebiusConfig, host: Hardware, wish: Wish, fill: bool) -> str:
    """Returns the smallest change of settings with which the model fits, as a whole command line, or which
    smaller quantisation would.
    """
    change = smallest_change(config, host, wish, fill)
    if change is not None:
        return f"this fits: {serve_command(change.applied(asked), change.plan)}"
    kind = smaller_quantisation(config, host, wish, fill)
    if kind:
        return f"no settings make it fit here; a GGUF model of it with experts in {kind} would"
    return "neither settings nor a GGUF model with experts in Q2_K make it fit here"


@contextmanager
def quiet() -> Iterator[None]:
    """Keys of config.json that nothing reads are reported when a model is loaded, not when it is planned."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)
