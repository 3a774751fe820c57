"""A real engine process, alone, that computes a tiny random checkpoint on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from app.cli import main as cli
from tests.helpers.warm_processes import Program, start_program


def write_one_layer(directory: Path) -> Path:
    """Returns a tiny checkpoint of one layer with random weights and a tokenizer."""
    with contextlib.suppress(SystemExit):
        cli(["models", "random", str(directory), "--shape", "tiny", "--layers", "1"])
    return directory


@contextlib.contextmanager
def engine_process(model: Path, address: str, log: Path, *options: str) -> Iterator[Program]:
    """Serves `model` as "tiny" at `address` until it is left, however that is."""
    command = [
        *("-m", "moebius", "gpu", str(model), "--device", "cpu", "--gpu-address", address),
        *("--expert-transport", "local", "--served-model-name", "tiny", *options),
    ]
    with log.open("wb") as sink:
        process = start_program(command, sink, sink)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
