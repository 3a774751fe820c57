"""The pool runs every task of every phase once, in order, and loses no exception; also with fewer cpus than
threads and with threads that sleep. The runs check themselves (`kernels/pool/stress.h`)."""

from __future__ import annotations

import pytest

from moebius import _kernels_testing as testing


def tasks_of(index: int) -> int:
    """Returns the tasks of a run's three phases; the second's number is computed by the pool from the first's
    results.
    """
    return (1 + index % 7) + (index * 31) % 2**32 % 7 + index % 3


def expected_tasks(runs: int, throw_every: int) -> int:
    """Tasks of all runs that do not throw."""
    kept = (i for i in range(runs) if throw_every == 0 or i % throw_every != throw_every - 1)
    return sum(tasks_of(index) for index in kept)


def run(threads: int, runs: int, spin_us: int, throw_every: int = 0, pause_every: int = 0) -> None:
    """One stress of the pool, which reports the number of tasks and exceptions it must report."""
    tasks, exceptions, _ = testing.pool_stress(
        threads=threads,
        runs=runs,
        spin_microseconds=spin_us,
        throw_every=throw_every,
        pause_every=pause_every,
    )
    assert tasks == expected_tasks(runs, throw_every)
    assert exceptions == (runs // throw_every if throw_every else 0)


@pytest.mark.parametrize("runs", [200_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_many_runs_oversubscribed(runs: int) -> None:
    """Several times more threads than cpus, and twice as many phases as starts: no hang, nothing lost."""
    run(8, runs, 20)


@pytest.mark.parametrize("spin_us", [0, 5, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3, 17])
def test_every_spin_and_size(threads: int, spin_us: int) -> None:
    """No result depends on how long threads spin, nor on how many there are."""
    run(threads, 3000, spin_us)


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_exceptions_end_the_run_and_reach_the_caller(threads: int) -> None:
    """After an exception no phase begins, nothing is left running, and the next run is whole."""
    run(threads, 7000, 5, throw_every=3)


@pytest.mark.parametrize("spin_us", [0, 20])
def test_sleepers_wake_between_runs(spin_us: int) -> None:
    """Threads that went to sleep in a pause take part again or are done without."""
    run(4, 4000, spin_us, pause_every=2)


def test_no_threads_is_refused() -> None:
    """The binding names what is wrong."""
    with pytest.raises(ValueError, match="threads is 0; it must be at least 1"):
        run(0, 1, 0)
