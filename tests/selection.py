"""Which tests a target of the Makefile runs, and a line at the end about what it leaves to others.

`make test` runs everything but what is marked `full`, and of tests marked `covering` a part of their
combinations; `--full` (`make test-all`) runs all, `--fast` (`make test-fast`) what `FAST` lists. Tests that
are named one by one (`file.py::test[case]`) always run.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

# Where a change of the gateway, the scheduler, the caches, configuration or checkpoints shows first, and one
# whole system: a tiny model served and asked over HTTP.
FAST = (
    "tests/unit/moebius/network/test_api_keys.py",
    "tests/unit/gpu_service/engine/test_block_table.py",
    "tests/unit/moebius/checkpoint/test_*.py",
    "tests/unit/app/test_cli.py",
    "tests/unit/moebius/config/test_loader.py",
    "tests/unit/repository/test_docs.py",
    # Not parsers, prompt processes and most grammars, which take minutes.
    "tests/unit/gateway/[!cp]*/*.py",
    "tests/unit/gateway/constraints/test_response_format.py",
    "tests/unit/gateway/prompts/test_jobs.py",
    "tests/unit/moebius/models/test_*.py",
    "tests/unit/gpu_service/cache/test_page_pool.py",
    "tests/unit/gpu_service/cache/test_radix_cache.py",
    "tests/unit/gpu_service/cache/test_request_states.py",
    "tests/unit/gpu_service/scheduler/test_*.py",
    "tests/unit/repository/test_structure.py",
    "tests/service/test_gguf_serve.py",
)
# Marks of tests that a machine may be unable to run, and where they run.
ELSEWHERE = {
    "multigpu": "on several GPUs",
    "gpu": "on a GPU",
    "amx": "on AMX",
    "numa": "in make test-numa",
    "pod": "in make test-pod",
}


def add_options(parser: pytest.Parser) -> None:
    """`--full` and `--fast`."""
    group = parser.getgroup("selection")
    group.addoption("--full", action="store_true", help="all combinations of parameters, all fuzz cases")
    group.addoption("--pods", action="store_true", help="build an image and run Pods (make test-pod)")
    group.addoption("--pod-image", action="store_true", help="with the image that was built before")
    group.addoption("--tls", action="store_true", help="with mutual TLS and HTTPS (make test-tls)")
    group.addoption("--fast", action="store_true", help="tests that find most mistakes within two minutes")


class Selection:
    """A pytest plugin, in the main process and in each worker."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        # Tests and files that were left out, by where they run.
        self._left: dict[str, int] = {}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """A file that is not to run is not imported either, which would take most of the time."""
        fast, path = self._config.getoption("--fast"), collection_path.as_posix()
        if (
            not fast
            or not fnmatch(collection_path.name, "test_*.py")
            or any(fnmatch(path, f"*/{each}") for each in FAST)
        ):
            return None
        self._left["files in make test"] = self._left.get("files in make test", 0) + 1
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselects what other targets run."""
        named = any("::" in each for each in self._config.args)
        left = set() if named or self._config.getoption("--full") else set(_spared(items))
        if left:
            self._left["in make test-all"] = len(left)
        if not named and not self._config.getoption("markexpr"):
            elsewhere = {item: where for item in items if item not in left and (where := _elsewhere(item))}
            self._left |= Counter(elsewhere.values())
            left |= set(elsewhere)
        if left:
            self._config.hook.pytest_deselected(items=list(left))
            items[:] = [item for item in items if item not in left]

    def pytest_sessionfinish(self) -> None:
        """A worker's message to the main process."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["left"] = self._left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended; all of them leave out the same."""
        self._left |= getattr(node, "workeroutput", {}).get("left", {})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The line about all that was not run."""
        left = Counter(self._left)
        for report in terminalreporter.stats.get("skipped", []):
            marked = (where for mark, where in ELSEWHERE.items() if mark in report.keywords)
            left[next(marked, "skipped for another reason (-rs)")] += 1
        if left:
            listed = ", ".join(f"{count} {where}" for where, count in sorted(left.items()))
            terminalreporter.write_line(f"Tests that run elsewhere: {listed}.")


def _elsewhere(item: pytest.Item) -> str:
    """Where a test runs that this machine cannot run; "" if it can, or none can.

    Skipping a thousand tests one by one, each with its reports from a worker, takes seconds.
    """
    marks = list(item.iter_markers())
    names = {mark.name for mark in marks}
    skips = "skip" in names or any(
        mark.name == "skipif" and mark.args and mark.args[0] is True for mark in marks
    )
    return next((where for mark, where in ELSEWHERE.items() if mark in names), "") if skips else ""


def _spared(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields what is marked `full`, and combinations that a covering set does without."""
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        if "full" in names:
            yield item
        elif "covering" in names and isinstance(item, pytest.Function):
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    for function in functions.values():
        yield from set(function) - set(covering(function))


def covering(items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Some of one function's cases, in which all values of any n of its axes meet; n: the mark's argument.

    Greedy. Among equals a case is chosen by its name: the same one on every run, another one in another test.
    """
    met = {item: _choices(item) for item in items}
    missing = set().union(*met.values())
    order = sorted(items, key=lambda item: zlib.crc32(item.name.encode()))
    found = []
    while missing:
        best = max(order, key=lambda item: len(met[item] & missing))
        missing -= met[best]
        found.append(best)
    return found


def _choices(item: pytest.Function) -> set[tuple[Any, ...]]:
    """Returns what of each n axes one case has. Arguments that one `parametrize` gives are one axis.

    A keyword of the mark is a function of the parameter of that name: values of one result count as one.
    """
    mark = next(item.iter_markers("covering"))
    params = {name: mark.kwargs.get(name, repr)(value) for name, value in item.callspec.params.items()}
    given = [each.args[0] for each in item.iter_markers("parametrize")]
    axes = [each.replace(" ", "").split(",") if isinstance(each, str) else list(each) for each in given]
    axes += [[name] for name in params if not any(name in axis for axis in axes)]  # fixtures
    values = sorted(tuple((name, params[name]) for name in axis) for axis in axes)
    return set(combinations(values, min(mark.args[0], len(values))))
