"""Guards `make test-newest`: what a newer package breaks is put down to that package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.tools.try_newest import find_culprits, groups_of, run_tests

NAMES = [
    frozenset({name}) for name in ("attrs", "click", "grpcio", "numpy", "pydantic", "torch", "transformers")
]


class World:
    """Checks that fail while certain packages are at their newest."""

    def __init__(self, culprits: dict[str, set[str]]) -> None:
        # Check -> packages of which each breaks it by itself.
        self.culprits = culprits
        self.runs = 0

    def __call__(self, reverted: frozenset[str], checks: Sequence[str]) -> set[str]:
        self.runs += 1
        return {check for check in checks if self.culprits[check] - reverted}


def test_each_package_is_named_with_what_it_breaks() -> None:
    """Two packages that break different tests are distinguished, without a run for every package."""
    world = World({"a": {"transformers"}, "b": {"click"}, "c": {"transformers"}})
    blame = find_culprits(NAMES, {"a", "b", "c"}, world)
    assert blame.by_packages == {("click",): {"b"}, ("transformers",): {"a", "c"}}
    assert world.runs <= 10


def test_packages_that_break_the_same_test_are_named_together() -> None:
    """No locked version alone fixes it: the result is the smallest set of halves in which all of them are."""
    blame = find_culprits(NAMES[:4], {"a"}, World({"a": {"attrs", "click"}}))
    assert blame.by_packages == {("attrs", "click"): {"a"}}


def test_nothing_broken_takes_no_run() -> None:
    """The usual case."""
    world = World({})
    assert find_culprits(NAMES, set(), world).by_packages == {}
    assert world.runs == 0


def test_packages_that_need_each_other_change_together() -> None:
    """A newest package that refuses the locked version of another is never tried with it; what is asked for
    by extras or for other systems does not count."""
    changed = {
        "pydantic": ("2.14.0", "2.15.0"),
        "pydantic-core": ("2.50.0", "2.51.0"),
        "numpy": ("2.4.0", "2.5.0"),
        "torch": ("2.13.0", "2.14.0"),
    }
    wants = {
        "pydantic": ["pydantic-core==2.51.0", 'torch>=2.14; extra == "torch"'],
        "torch": ["numpy>=2", 'pydantic>=3; sys_platform == "win32"', "unknown>=1"],
    }
    expected = [frozenset({"numpy"}), frozenset({"pydantic", "pydantic-core"}), frozenset({"torch"})]
    assert groups_of(changed, wants) == expected


def test_failures_are_known_by_their_ids(tmp_path: Path) -> None:
    """Tests, fixtures and files that cannot be imported; ids may hold what pytest's summary separates by."""
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef bad(): raise ValueError\n"
        "@pytest.mark.parametrize('x', ['a b - c', 'd'])\ndef test_x(x): assert x == 'd'\n"
        "def test_y(bad): pass\n"
    )
    (tmp_path / "test_b.py").write_text("import nowhere\n")
    arguments = ["-n0", "--rootdir", str(tmp_path), "-c", "/dev/null", "--continue-on-collection-errors"]
    status, failed = run_tests(sys.executable, [*arguments, str(tmp_path)])
    assert status == 1
    assert failed == {"test_a.py::test_x[a b - c]", "test_a.py::test_y", "test_b.py"}
