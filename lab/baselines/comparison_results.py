"""What a comparison with llama.cpp has measured, in a file from which a later call goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from app.bench.output import BenchTable, Column, or_dash, write_json
from lab.baselines.serving_load import Measured
from moebius.errors import UserError

# In place of a cell that took too long.
NOTHING = Measured(0.0, (), 0.0)


class Key(NamedTuple):
    """A cell of the table."""

    # "prefill" of a number of tokens, "decode" of a number of streams.
    phase: str
    size: int


@dataclass(frozen=True)
class Row:
    """The keys of the JSON rows; filled by `Results.row`. Speeds in tokens per second."""

    phase: str
    size: int
    moebius: float
    llama_server: float
    # 0: not measured (llama-bench decodes one stream only).
    llama_bench: float
    # Ours over the better of theirs; 0: one of them has no figure.
    ratio: float
    moebius_repetitions: tuple[float, ...]
    llama_repetitions: tuple[float, ...]
    # Share of generated tokens that are the ones the model's head prefers.
    moebius_correct: float
    llama_correct: float
    # Different experts that a step (or chunk) touches, a mean over layers.
    distinct_experts: float


TABLE = BenchTable[Row](
    Column("phase", lambda row: row.phase, 7, left=True),
    Column("tokens/streams", lambda row: f"{row.size}", 8),
    Column("moebius", lambda row: f"{row.moebius:.1f}", 9),
    Column("llama-server", lambda row: f"{row.llama_server:.1f}", 9),
    Column("llama-bench", lambda row: or_dash(row.llama_bench, 1), 9),
    Column("ratio", lambda row: f"{row.ratio:.2f}", 6),
    Column("experts/layer", lambda row: f"{row.distinct_experts:.1f}", 6),
    Column("same tokens", lambda row: f"{min(row.moebius_correct, row.llama_correct):.3f}", 6),
)


class Results:
    """What was measured, in a file from which a later call goes on; without a file in memory only."""

    def __init__(self, file: Path | None, settings: dict[str, Any]) -> None:
        """Raises UserError when the file is of other settings."""
        self._file, self._settings = file, settings
        # By system and cell; a speed of 0: it took longer than it may.
        self.cells: dict[tuple[str, Key], Measured] = {}
        self.distinct: dict[Key, float] = {}
        self.ready_s: dict[str, float] = {}
        if file is not None and file.is_file():
            self._load(json.loads(file.read_text()))

    def _load(self, written: dict[str, Any]) -> None:
        if written.get("settings") != json.loads(json.dumps(self._settings)):
            raise UserError(f"--json {self._file}: is of other settings: {written.get('settings')}")
        for cell in written["cells"]:
            key = Key(cell["phase"], cell["size"])
            measured = Measured(cell["tokens_per_second"], tuple(cell["repetitions"]), cell["correct"])
            self.cells[cell["system"], key] = measured
        self.distinct = {Key(phase, size): count for phase, size, count in written["distinct"]}
        self.ready_s = written["ready_s"]

    def add(self, system: str, key: Key, measured: Measured) -> None:
        """Prints and writes the cell, and the row when both systems have it."""
        self.cells[system, key] = measured
        each = " ".join(f"{speed:.1f}" for speed in measured.repetitions) or "took too long"
        print(
            f"{system} {key.phase} {key.size}: {measured.tokens_per_second:.1f} tokens/s ({each})", flush=True
        )
        row = self.row(key)
        if row is not None and system != "llama-bench":
            TABLE.print_row(row)
        self.write()

    def row(self, key: Key) -> Row | None:
        """Returns the row; None until both servers have the cell."""
        ours, theirs = (self.cells.get((system, key)) for system in ("moebius", "llama-server"))
        if ours is None or theirs is None:
            return None
        alone = self.cells.get(("llama-bench", key), NOTHING).tokens_per_second
        best = max(theirs.tokens_per_second, alone)
        return Row(
            phase=key.phase,
            size=key.size,
            moebius=ours.tokens_per_second,
            llama_server=theirs.tokens_per_second,
            llama_bench=alone,
            ratio=ours.tokens_per_second / best if best else 0.0,
            moebius_repetitions=ours.repetitions,
            llama_repetitions=theirs.repetitions,
            moebius_correct=ours.correct,
            llama_correct=theirs.correct,
            distinct_experts=self.distinct.get(key, 0.0),
        )

    def rows(self) -> list[Row]:
        """Returns the rows of all cells that both have."""
        keys = sorted({key for _, key in self.cells}, key=lambda key: (key.phase != "prefill", key.size))
        return [row for row in map(self.row, keys) if row is not None]

    def write(self) -> None:
        """All of it. Raises UserError."""
        cells = [
            {"system": system, **key._asdict(), **asdict(one)} for (system, key), one in self.cells.items()
        ]
        document = {
            "settings": self._settings,
            "ready_s": self.ready_s,
            "cells": cells,
            "distinct": [[*key, count] for key, count in self.distinct.items()],
            "rows": [asdict(row) for row in self.rows()],
        }
        write_json(document, self._file)
