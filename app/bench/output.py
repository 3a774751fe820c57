"""How benches report: a table whose rows are printed as they are measured, and JSON rows in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

from moebius.errors import UserError

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column; filled by the bench."""

    title: str
    text: Callable[[Row], str]  # A row's cell; "" where the row has none.
    # Characters of the widest cell; the title may be wider.
    width: int = 0
    left: bool = False


class BenchTable(Generic[Row]):
    """Columns of fixed width: a run of an hour that is stopped has shown what it had measured."""

    def __init__(self, *columns: Column[Row]) -> None:
        self._columns = columns

    def print_header(self) -> None:
        """Prints the titles."""
        self._print(column.title for column in self._columns)

    def print_row(self, row: Row) -> None:
        """Prints one row under the titles."""
        self._print(column.text(row) for column in self._columns)

    def print_all(self, rows: Sequence[Row]) -> None:
        """Prints titles and rows."""
        self.print_header()
        for row in rows:
            self.print_row(row)

    def _print(self, cells: Any) -> None:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        width = 0
        for column in self._columns:
            widest = max(column.width, len(column.title))
            width += widest + 1
            table.add_column(justify="left" if column.left else "right", width=widest, no_wrap=True)
        table.add_row(*cells)
        Console(file=sys.stdout, width=width, highlight=False, markup=False).print(table)
        sys.stdout.flush()


def or_dash(value: float | None, digits: int, missing: str = "-") -> str:
    """A cell of a figure that a row may lack."""
    return f"{value:.{digits}f}" if value else missing


def write_json(document: object, path: Path | None) -> None:
    """Writes rows (dataclasses or dictionaries) or a document; nothing without a path. Raises UserError."""
    if path is None:
        return
    if isinstance(document, (list, tuple)):
        document = [row if isinstance(row, dict) else asdict(row) for row in document]
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from None
