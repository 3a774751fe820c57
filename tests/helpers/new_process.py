"""What tests have to do in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def new_process() -> Iterator[Callable[..., None]]:
    """Yields what runs a function of a module in a process that does nothing else, so has no threads and no
    locks that a fork of it would find taken. It raises what the function raises."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
