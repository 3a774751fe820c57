"""What a drill did and found: a table for people, a JSON row for files, an exit status for `make`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.drills.load import Outcome, tally
from tests.drills.watcher import Drift


@dataclass
class Report:
    """Filled while a drill runs; `finish` prints it."""

    drill: str
    settings: dict[str, Any]
    # What was injected, and how often.
    injected: dict[str, int] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)
    # (what has to hold, whether it did, what was seen).
    promises: list[tuple[str, bool, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    load_average: list[float] = field(default_factory=lambda: [os.getloadavg()[0]])

    def inject(self, what: str, count: int = 1) -> None:
        """Counts a fault."""
        self.injected[what] = self.injected.get(what, 0) + count
        self.load_average.append(os.getloadavg()[0])
        Console(stderr=True).log(f"{self.drill}: {what}", highlight=False)

    def promise(self, what: str, holds: bool, seen: object = "") -> None:
        """Records whether something that has to hold did."""
        self.promises.append((what, holds, str(seen)))

    def promise_flat(self, drift: Sequence[Drift]) -> None:
        """Records growth, and that there is none to speak of."""
        self.drift = list(drift)
        grown = [f"{one.name} {one.first:.1f} -> {one.last:.1f}" for one in drift if not one.flat]
        self.promise("memory, descriptors, threads and shared memory flat", not grown, "; ".join(grown))

    @property
    def kept(self) -> bool:
        """Whether every promise held."""
        return all(holds for _, holds, _ in self.promises)

    def finish(self, output: Path | None) -> int:
        """Prints everything, appends the JSON row to `output`; returns the exit status."""
        row = self.row()
        console = Console()
        console.print(self._table(row), markup=False)
        print(json.dumps(row))
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return 0 if self.kept else 1

    def row(self) -> dict[str, Any]:
        """Returns the JSON row."""
        numbers = tally(self.outcomes)
        return {
            "drill": self.drill,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
            "load_average": round(sum(self.load_average) / len(self.load_average), 1),
            "seconds": round(time.monotonic() - self.started, 1),
            "settings": self.settings,
            "injected": self.injected,
            "sent": numbers.sent,
            "failed": numbers.count("refused", "broken", "late"),
            "fates": numbers.fates,
            "wrong": numbers.count("wrong"),
            "slowest_s": round(numbers.slowest_s, 2),
            "failures": numbers.details,
            "drift": [asdict(one) | {"flat": one.flat} for one in self.drift],
            "facts": self.facts,
            "promises": [{"what": what, "kept": kept, "seen": seen} for what, kept, seen in self.promises],
            "kept": self.kept,
        }

    def _table(self, row: dict[str, Any]) -> Table:
        table = Table("", "value", title=f"drill {self.drill}: {'kept' if self.kept else 'BROKEN'}")
        for key in ("host", "load_average", "seconds", "settings", "injected", "sent", "fates", "slowest_s"):
            table.add_row(key, str(row[key]))
        for key, value in self.facts.items():
            table.add_row(key, str(value))
        for text in row["failures"]:
            table.add_row("failure", text)
        for one in self.drift:
            mark = "" if one.flat else " GREW"
            table.add_row(one.name, f"{one.first:.1f} -> {one.last:.1f} (allowed +{one.allowed:.1f}){mark}")
        for what, kept, seen in self.promises:
            table.add_row("kept" if kept else "BROKEN", f"{what}{': ' if seen else ''}{seen}")
        return table
