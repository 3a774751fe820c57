"""The commands that this package adds to the command line of `app`."""

from __future__ import annotations

import typer

from lab.commands import bench, random_model, verify


def register(app: typer.Typer, bench_group: typer.Typer, models_group: typer.Typer) -> None:
    """Adds `verify`, the benchmarks beside serve, decode and start, and `models random`."""
    verify.register(app)
    bench.register(bench_group)
    random_model.register(models_group)
