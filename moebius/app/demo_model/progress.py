"""How the builder reports its progress: one callback, and a terminal bar that implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

ProgressCallback = Callable[[str, int, int], None]
"""`callback(stage, done, total)`: `stage` is a short text for people, `done` of `total` units of it are
finished. `total` 0 means that the length is unknown. The last call of a stage has `done == total`."""


def silent(stage: str, done: int, total: int) -> None:
    """A callback that shows nothing."""


@contextmanager
def rich_progress() -> Iterator[ProgressCallback]:
    """Show one bar per stage on stderr (stdout stays free for the path) while the context is open."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=None)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield update
