"""The pool loses no task and never hangs: many short loops, more threads than cores, several callers, and
neighbours that keep the cores busy."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from moebius.kernels import ExpertEngine
from tests.helpers.idle import idle_share
from tests.helpers.moe_golden import load_layer, random_expert, random_rows

HIDDEN, INTERMEDIATE, EXPERTS = 48, 32, 4


def worker_threads() -> list[Path]:
    """Threads of all pools in this process, by the name the pool gives them."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            if (task / "comm").read_text().startswith("experts-"):
                found.append(task)
    return found


def settles_at(count: int) -> bool:
    """A joined thread stays listed for an instant; says whether the number of workers becomes `count`."""
    deadline = time.monotonic() + 60
    while len(worker_threads()) != count and time.monotonic() < deadline:
        time.sleep(0.001)
    return len(worker_threads()) == count


def cpu_ticks(threads: list[Path]) -> int:
    """Returns user and system time of threads, in ticks of 10 ms (proc(5), fields 14 and 15 of stat)."""
    fields = [(thread / "stat").read_text().rsplit(")", 1)[1].split() for thread in threads]
    return sum(int(field[11]) + int(field[12]) for field in fields)


def loaded_engine(num_threads: int, cpus: tuple[int, ...] = ()) -> ExpertEngine:
    rng = np.random.default_rng(0)
    engine = ExpertEngine(
        HIDDEN, INTERMEDIATE, EXPERTS, 1, weight_format="float32", num_threads=num_threads, cpus=cpus
    )
    load_layer(engine, 0, {e: random_expert(rng, HIDDEN, INTERMEDIATE) for e in range(EXPERTS)})
    return engine


def check_calls(engine: ExpertEngine, calls: int) -> None:
    """Every call writes the whole output: a lost task would leave the garbage of a fresh array."""
    routed = random_rows(np.random.default_rng(1), 3, HIDDEN, 2, (0, EXPERTS))
    arguments = (0, routed.hidden_states, routed.topk_ids, routed.topk_weights)
    wanted = loaded_engine(1).forward(*arguments)
    for _ in range(calls):
        np.testing.assert_array_equal(engine.forward(*arguments), wanted)


@pytest.mark.parametrize("num_threads", [2, 5, 16])
def test_many_loops_oversubscribed(num_threads: int) -> None:
    check_calls(loaded_engine(num_threads), 1500)


def test_all_threads_on_one_cpu() -> None:
    """Pinned onto the caller's own cpu, workers can only run when it is given up: still no hang."""
    cpu = min(os.sched_getaffinity(0))
    check_calls(loaded_engine(3, (cpu, cpu, cpu)), 200)


def test_sleeping_workers_wake() -> None:
    """Pauses longer than the spin send workers to sleep; the next call must find or do without them."""
    engine = loaded_engine(4)
    for _ in range(30):
        time.sleep(0.003)
        check_calls(engine, 1)


def test_concurrent_callers_are_serialised() -> None:
    """Mailbox and gRPC may call at once; each gets its own result."""
    engine = loaded_engine(3)
    failures: list[BaseException] = []

    def caller() -> None:
        try:
            check_calls(engine, 150)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
    assert not failures
    assert engine.stats().calls == 600


def test_next_to_busy_processes() -> None:
    """Threads = cores with every core taken by others: all loops finish."""
    cores = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        check_calls(loaded_engine(cores), 100)
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_engines_start_and_stop() -> None:
    """Dropping an engine ends its threads; creating many leaves none behind."""
    before = len(worker_threads())
    for _ in range(40):
        engine = loaded_engine(3)
        check_calls(engine, 1)
        assert settles_at(before + 2)
        del engine
    assert settles_at(before)


def test_idle_workers_use_no_cpu() -> None:
    """Workers spin for microseconds, then sleep: three idle ones stay below 2 % of a core together."""
    engine = loaded_engine(4)
    check_calls(engine, 10)
    workers = worker_threads()
    assert len(workers) >= 3
    assert idle_share(lambda: cpu_ticks(workers) * 0.01) < 0.02
    check_calls(engine, 10)


def test_gil_is_free_during_forward() -> None:
    """Another Python thread makes progress while one long forward runs."""
    engine = loaded_engine(1)
    routed = random_rows(np.random.default_rng(1), 60000, HIDDEN, 4, (0, EXPERTS))
    arguments = (0, routed.hidden_states, routed.topk_ids, routed.topk_weights)
    worker = threading.Thread(target=engine.forward, args=arguments)
    worker.start()
    seen_running = 0
    while worker.is_alive():
        seen_running += engine.stats().calls == 0
    worker.join()
    assert seen_running > 0
