"""The newest of everything, in an environment of its own, and which package breaks what: `make test-newest`.

`python -m tests.tools.try_newest [--beyond] [PYTEST-ARGUMENT ...]`. `--beyond` looks past the ranges of
pyproject.toml, too. What fails with the newest packages, and not with the locked ones, is tried again with
halves of the packages at their locked versions, until one is found whose locked version fixes it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKED, NEWEST = ROOT / ".venv", ROOT / "build" / "newest"
CHECKS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "mypy": ["-m", "mypy"],
}
# Failed tests of one file are tried again together; of more files than this, the first ones.
MOST_TESTS = 40
# Checks and tests that fail when the given packages have their locked versions.
Try = Callable[[frozenset[str], Sequence[str]], set[str]]


@dataclass
class Blame:
    """Which locked packages fix which failures; filled by `find_culprits`."""

    # Packages, of which the locked versions fix these checks and tests together.
    by_packages: dict[tuple[str, ...], set[str]] = field(default_factory=dict)


def find_culprits(groups: Sequence[frozenset[str]], failing: set[str], try_with: Try) -> Blame:
    """Returns which of the groups of packages has to keep its locked versions.

    `failing` fail with all of them at their newest, and with none of them so.
    """
    blame = Blame()
    _search(list(groups), failing, try_with, blame)
    return blame


def _search(groups: list[frozenset[str]], failing: set[str], try_with: Try, blame: Blame) -> None:
    if not failing:
        return
    if len(groups) == 1:
        blame.by_packages.setdefault(tuple(sorted(groups[0])), set()).update(failing)
        return
    middle = len(groups) // 2
    left = set(failing)
    for half in (groups[:middle], groups[middle:]):
        if left:
            fixed = left - try_with(frozenset().union(*half), sorted(left))
            _search(half, fixed, try_with, blame)
            left -= fixed
    if left:
        # It takes packages of both halves.
        everything = frozenset().union(*groups)
        blame.by_packages.setdefault(tuple(sorted(everything)), set()).update(left)


def groups_of(changed: dict[str, tuple[str, str]], wants: dict[str, list[str]]) -> list[frozenset[str]]:
    """Returns the packages that can only change together: one that needs a newer version of another than the
    locked one.

    `changed`: name -> locked and newest version; `wants`: name -> requirements of the newest version.
    """
    group = {name: {name} for name in changed}
    for name, texts in wants.items():
        for text in texts:
            one = Requirement(text)
            other = canonicalize_name(one.name)
            if name not in changed or other not in changed:
                continue
            applies = one.marker is None or one.marker.evaluate({"extra": ""})
            if applies and not one.specifier.contains(changed[other][0], prereleases=True):
                together = group[name] | group[other]
                group.update(dict.fromkeys(together, together))
    return sorted({frozenset(each) for each in group.values()}, key=sorted)


def locked_versions(python: str) -> dict[str, str]:
    """Returns the versions of what developers have without a GPU."""
    directory, found = ROOT / "deploy" / "locks" / f"python{python}", dict[str, str]()
    for kind in ("serve", "dev", "cpu"):
        text = (directory / f"{kind}.txt").read_text()
        found.update(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    return found


class Environment:
    """The environment with the newest packages."""

    def __init__(self, directory: Path) -> None:
        self.python = str(directory / "bin" / "python")
        self.locked = locked_versions(self._ask("import sys; print('%d.%d' % sys.version_info[:2])"))
        code = "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]"
        pairs = (line.split() for line in self._ask(code).splitlines())
        newest: dict[str, str] = {canonicalize_name(name): version for name, version in pairs}
        self.changed = {
            name: (version, newest[name])
            for name, version in self.locked.items()
            if name in newest and newest[name] != version
        }
        self.added = sorted(set(newest) - set(self.locked) - {"torch", "pip", "moebius"})
        self._reverted: frozenset[str] = frozenset()

    def groups(self) -> list[frozenset[str]]:
        """Returns the groups, as `groups_of`, by what the newest packages say that they need."""
        wants = {}
        for name in self.changed:
            code = f"import importlib.metadata as m; print(*(m.requires({name!r}) or ()), sep='\\n')"
            wants[name] = self._ask(code).splitlines()
        return groups_of(self.changed, wants)

    def revert(self, names: frozenset[str]) -> None:
        """These have their locked versions, all others their newest. Raises CalledProcessError."""
        wanted = [f"{name}=={self.changed[name][0]}" for name in sorted(names - self._reverted)]
        wanted += [f"{name}=={self.changed[name][1]}" for name in sorted(self._reverted - names)]
        if wanted:
            pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, *wanted], check=True)
        self._reverted = names

    def failing(self, names: frozenset[str], checks: Sequence[str]) -> set[str]:
        """Returns those of the given checks and tests that fail, with locked versions of `names`."""
        self.revert(names)
        return failing(self.python, checks)

    def _ask(self, code: str) -> str:
        return subprocess.run(
            [self.python, "-c", code], check=True, capture_output=True, text=True, cwd="/"
        ).stdout.strip()


def failing(python: str, checks: Sequence[str]) -> set[str]:
    """Returns those of the names of CHECKS and tests, by their ids, that fail."""
    found = {name for name in checks if name in CHECKS and _run([python, *CHECKS[name]])[0]}
    tests = [name for name in checks if name not in CHECKS]
    if tests:
        status, failed = run_tests(python, ["-n0", *tests])
        # It ended before the first test: in an import, or in a file of fixtures.
        found |= set(tests) if status and not failed else failed & set(tests)
    return found


def run_tests(python: str, arguments: Sequence[str], show: bool = False) -> tuple[int, set[str]]:
    """Status, and ids of what failed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "failed"
        plugin = ["-p", "tests.tools.failed_ids", "--failed-ids", str(path)]
        status = _run([python, "-m", "pytest", *plugin, *arguments], show)[0]
        return status, set(path.read_text().splitlines()) if path.exists() else set()


def _run(command: Sequence[str], show: bool = False) -> tuple[int, str]:
    """Returns status and output, which is shown while it comes if asked."""
    lines = []
    environment = os.environ | {"PATH": f"{Path(command[0]).parent}:{os.environ['PATH']}"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if show:
                sys.stdout.write(line)
                sys.stdout.flush()
    return process.returncode, "".join(lines)


def report(environment: Environment, blame: Blame, always: set[str]) -> list[str]:
    """Returns the lines that say what broke, by package."""
    lines = []
    for packages, checks in sorted(blame.by_packages.items()):
        named = ", ".join(
            f"{one} {environment.changed[one][1]} (locked: {environment.changed[one][0]})" for one in packages
        )
        lines += [f"broken by {named}:", *(f"  {check}" for check in sorted(checks))]
    if always:
        lines += ["fails with the locked packages, too:", *(f"  {check}" for check in sorted(always))]
    return lines


def main() -> int:
    """0: nothing is broken by a newer package."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beyond", action="store_true", help="whatever the ranges of pyproject.toml say")
    options, arguments = parser.parse_known_args()
    settings = {"NEWEST": "all" if options.beyond else "ranges", "PYTHON": str(LOCKED / "bin" / "python")}
    subprocess.run(["tools/setup", str(NEWEST)], cwd=ROOT, env=os.environ | settings, check=True)
    environment = Environment(NEWEST)
    print(
        f"newer than locked: {len(environment.changed)} packages; not locked: {environment.added or 'none'}"
    )
    for name, (before, after) in sorted(environment.changed.items()):
        print(f"  {name} {before} -> {after}")
    broken = {name for name in CHECKS if _run([environment.python, *CHECKS[name]], show=True)[0]}
    broken |= set(sorted(run_tests(environment.python, arguments, show=True)[1])[:MOST_TESTS])
    # With the locked versions, in this environment and not in .venv, so that nothing else differs.
    always = environment.failing(frozenset(environment.changed), sorted(broken)) if broken else set()
    blame = find_culprits(environment.groups(), broken - always, environment.failing)
    print("\n".join(report(environment, blame, always)) or "nothing is broken by a newer package")
    return int(bool(blame.by_packages))


if __name__ == "__main__":
    sys.exit(main())
