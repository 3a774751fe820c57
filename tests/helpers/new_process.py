"""What a test has to do in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def run_in_new_process(function: Callable[..., None], *arguments: object) -> None:
    """Runs a function of a module in a process that has done nothing else, so has no threads and no locks
    that a fork of it would find taken. Raises what it raises."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(function, *arguments).result()
