"""Invariant: what `make test` leaves out is run by another target, and it still meets each pair of values."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.selection import FAST

pytest_plugins = ["pytester"]

HOOKS = """
from tests import selection

def pytest_addoption(parser):
    selection.add_options(parser)

def pytest_configure(config):
    config.pluginmanager.register(selection.Selection(config), "selection")
"""
TESTS = """
import pytest

@pytest.mark.covering(2)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b, c", [(1, 2), (3, 4), (5, 6)])
@pytest.mark.parametrize("d", "xy")
def test_axes(a, b, c, d):
    print("case", a, b, c, d)

@pytest.mark.covering(1, word=len)
@pytest.mark.parametrize("word", ["one", "two", "three"])
def test_alike(word):
    print("alike", len(word))

@pytest.mark.full
def test_large():
    pass

@pytest.mark.gpu
@pytest.mark.skip
def test_plain():
    pass
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    pytester.makeconftest(HOOKS)
    pytester.makepyfile(test_it=TESTS)
    without = [word for name in ("xdist", "asyncio", "cacheprovider") for word in ("-p", f"no:{name}")]
    return pytester.runpytest_inprocess("-s", *without, *arguments)


def test_all_pairs_of_values_are_left(pytester: pytest.Pytester) -> None:
    result = run(pytester)
    cases = [line.split("case ")[1].split() for line in result.outlines if "case " in line]
    pairs = {(i, j, case[i], case[j]) for case in cases for i, j in ((0, 1), (0, 3), (1, 3))}
    assert pairs >= {
        *((0, 1, a, b) for a, b in product("0123", "135")),
        *((0, 3, a, d) for a, d in product("0123", "xy")),
        *((1, 3, b, d) for b, d in product("135", "xy")),
    }
    assert 12 <= len(cases) < 24
    assert sorted(line[-1] for line in result.outlines if "alike " in line) == ["3", "5"]
    spared = 24 - len(cases) + 2
    result.stdout.fnmatch_lines([f"Tests that run elsewhere: {spared} in make test-all, 1 on a GPU."])


@pytest.mark.parametrize("how", ["--full", "by name"])
def test_all_run_in_full_and_by_name(pytester: pytest.Pytester, how: str) -> None:
    if how == "--full":
        run(pytester, how).assert_outcomes(passed=24 + 3 + 1, deselected=1)
    else:
        run(pytester, "test_it.py::test_large").assert_outcomes(passed=1)


def test_fast_says_how_many_are_left(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--fast")
    result.assert_outcomes()
    result.stdout.fnmatch_lines(["Tests that run elsewhere: 1 files in make test."])


def test_what_is_fast_is_there() -> None:
    """A file that was renamed would silently leave `make test-fast`."""
    root = Path(__file__).parents[3]
    assert not [pattern for pattern in FAST if not list(root.glob(pattern))]
