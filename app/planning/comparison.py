"""Plans side by side: quantisations of one model, machines that one might buy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from app.bench.output import write_json
from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.drafts import decided_drafts
from app.planning.gpu_use import plan_capacity
from app.planning.hardware import Hardware, HardwareOptions, hardware
from app.planning.report import EXIT_DOES_NOT_FIT, document, quiet, serve_command
from moebius.config import MoebiusConfig
from moebius.errors import UserError

# A stream that people read along with.
LEAST_TOKENS_PER_SECOND = 10.0


@dataclass(frozen=True)
class Variant:
    """One model of those that were asked about; filled by `moebius plan`."""

    name: str  # Of its quantisation or file; empty: there is only one.
    asked: MoebiusConfig  # As the user would name it.
    config: MoebiusConfig  # With its files found.
    file_bytes: int  # Of a GGUF model, else 0.


@dataclass(frozen=True)
class Compared:
    """A model on a machine; filled by `compare`."""

    variant: Variant
    machine: str  # As --compare names it; empty: there is only one.
    plan: CapacityPlan | None  # None: it does not fit.
    reason: str  # Why it does not; empty where it does.

    @property
    def tokens_per_second(self) -> float:
        """The predicted rate of one stream; 0 where nothing is served."""
        return self.plan.decode[0].tokens_per_second if self.plan is not None else 0.0


def machines(text: str, options: HardwareOptions) -> dict[str, HardwareOptions]:
    """Returns the machines of `--compare`: GPUs, and RAM in GiB after an @, comma separated, as in
    4090@64,none@256.

    Raises UserError for text of another form; names of GPUs are checked when a row is planned.
    """
    found = {}
    for name in text.split(","):
        gpus, at, ram = name.strip().partition("@")
        if not gpus or (at and not ram.replace(".", "", 1).isdigit()):
            raise UserError(
                f"--compare: {name!r} is not allowed; allowed: GPUS or GPUS@GIB (RAM), as in 4090@64,none@256"
            )
        found[name.strip()] = replace(options, gpus=gpus, ram_gib=float(ram) if at else options.ram_gib)
    return found


def compare(
    variants: Sequence[Variant], chosen: Mapping[str, HardwareOptions], wish: Wish, fill: bool
) -> list[Compared]:
    """Returns every model on every machine. Raises UserError for what no hardware changes."""
    found = []
    hosts = {machine: hardware(options) for machine, options in chosen.items()}
    for variant in variants:
        for machine, host in hosts.items():
            try:
                with quiet():
                    plan = _plan(variant.config, host, wish, fill)
                found.append(Compared(variant, machine, plan, ""))
            except DoesNotFit as error:
                found.append(Compared(variant, machine, None, " ".join(str(error).split())))
    return found


def _plan(config: MoebiusConfig, host: Hardware, wish: Wish, fill: bool) -> CapacityPlan:
    def planned(each: MoebiusConfig) -> CapacityPlan:
        return plan_capacity(each, host, wish, fill, explain=False)

    decided, _ = decided_drafts(config, planned, wish)
    return plan_capacity(decided, host, wish, fill)


def best(rows: Sequence[Compared], least: float = LEAST_TOKENS_PER_SECOND) -> Compared | None:
    """Returns the largest file of which one stream gets `least` tokens/s, else the fastest; None: nothing
    fits.
    """
    fitting = [row for row in rows if row.plan is not None]
    quick = [row for row in fitting if row.tokens_per_second >= least]
    if quick:
        return max(quick, key=lambda row: (row.variant.file_bytes, row.tokens_per_second))
    return max(fitting, key=lambda row: row.tokens_per_second, default=None)


def run(
    variants: Sequence[Variant],
    chosen: Mapping[str, HardwareOptions],
    wish: Wish,
    fill: bool,
    json_file: Path | None,
) -> list[Compared]:
    """Prints the rows, then how the best one is served, and writes them all.

    Raises typer.Exit with status 1, after a line on stderr, when none fits; UserError as `compare`.
    """
    rows = compare(variants, chosen, wish, fill)
    console = Console()
    console.print(_table(rows))
    for row in rows:
        if row.reason:
            console.print(f"{_label(row)}: {row.reason}", style="dim", highlight=False, soft_wrap=True)
    served = best(rows)
    if served is not None and served.plan is not None:
        command = serve_command(served.variant.asked, served.plan)
        on = f" on {served.machine}" if served.machine else ""
        console.print(f"best: {_label(served)}, {served.tokens_per_second:.1f} tokens/s for one stream")
        console.print(f"serve with{on}: {command}", highlight=False, soft_wrap=True)
    write_json({"rows": [_document(row) for row in rows]}, json_file)
    if served is None:
        print("moebius: does not fit: none of these", file=sys.stderr)
        raise typer.Exit(EXIT_DOES_NOT_FIT)
    return rows


def _label(row: Compared) -> str:
    return " on ".join(filter(None, (row.variant.name, row.machine)))


def _table(rows: Sequence[Compared]) -> Table:
    table = Table("", title="Predicted tokens/s", title_justify="left", box=SIMPLE, pad_edge=False)
    streams = next((row.plan.decode for row in rows if row.plan is not None), ())
    decode = [f"{each.rows} stream{'s' if each.rows > 1 else ''}" for each in streams]
    for name in ("file GB", "experts on GPUs", "KV tokens", *decode, "prefill"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        size = f"{row.variant.file_bytes / 1e9:.1f}" if row.variant.file_bytes else "-"
        if row.plan is None:
            table.add_row(_label(row), size, "does not fit")
            continue
        plan = row.plan
        speeds = [f"{each.tokens_per_second:.1f}" for each in (*plan.decode, plan.prefill)]
        table.add_row(_label(row), size, f"{plan.residency.share:.0%}", f"{plan.kv.tokens}", *speeds)
    return table


def _document(row: Compared) -> dict[str, Any]:
    found: dict[str, Any] = {"name": row.variant.name, "machine": row.machine, "reason": row.reason}
    found |= {"file_bytes": row.variant.file_bytes}
    if row.plan is None:
        return found | {"plan": None}
    return found | {"plan": document(row.plan, serve_command(row.variant.asked, row.plan))}
