"""Guards the documentation: files, modules, commands, options and targets that it names exist."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from app.cli import app
from moebius.other_servers.setting_names import OTHER_NAMES

ROOT = Path(__file__).resolve().parents[3]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in ROOT_PAGES), *sorted((ROOT / "docs").glob("**/*.md"))]
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()
FOLDERS = {str(parent) for path in TRACKED for parent in Path(path).parents}
PATH = re.compile(
    r"(?<![\w./-])((?:bench|docs|expert_service|gateway|gpu_service|kernels|moebius|protos|tests|tools)/[\w./*{},-]*)"
)
FILE = re.compile(r"(?<![\w./*{<-])([a-z_][\w/]*\.(?:py|cc|h|cu|proto|mk|sh))(?![\w*])")
COMMAND = re.compile(r"(?:^|[\s`(/])moebius ((?:[a-z][\w-]*)(?: .*)?)")
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")
# Of pytest, pip, containers and other programs, which this test cannot ask.
FOREIGN = {"--help", "--help-all", "--hypothesis-profile"} | {
    "--no-deps",
    "--pids-limit",
    "--shm-size",
    "--ulimit",
    "--version",
}


def code_of(page: Path) -> Iterator[str]:
    """Yields the lines of code blocks (continued ones joined), and what stands in backticks elsewhere."""
    text = page.read_text().replace("\\\n", " ")
    for number, part in enumerate(text.split("```")):
        if number % 2:
            yield from part.splitlines()
        else:
            yield from (found.replace("\n", " ") for found in re.findall(r"`([^`]+)`", part))
            yield from (line[4:] for line in part.splitlines() if line.startswith("    "))


def expanded(pattern: str) -> Iterator[str]:
    """`a/{b,c}.py` as two patterns."""
    found = re.search(r"{([^}]*)}", pattern)
    if found is None:
        yield pattern
        return
    for choice in found[1].split(","):
        yield from expanded(pattern.replace(found[0], choice, 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links_lead_somewhere(page: Path) -> None:
    """Files and folders in code, by their place in the tree, and targets of links, by the page's."""
    named = itertools.chain.from_iterable(PATH.findall(code) for code in code_of(page))
    patterns = (each.rstrip("/.,") for name in named for each in expanded(name))
    missing = [each for each in patterns if not any(fnmatch(path, each) for path in (*TRACKED, *FOLDERS))]
    # By the end of their paths, as in `layers/moe.py`; what is set in italics or with stars is a pattern.
    short = {name for code in code_of(page) for name in FILE.findall(code)}
    missing += [name for name in short if not any(f"/{path}".endswith(f"/{name}") for path in TRACKED)]
    assert not missing
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def options_of(command: Any) -> set[str]:
    """Returns a command's options as they are typed."""
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


def commands_below(command: Any) -> Iterator[Any]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from commands_below(each)


@cache
def all_commands() -> Any:
    return typer.main.get_command(app)


@cache
def options_of_any() -> set[str]:
    found = map(options_of, commands_below(all_commands()))
    return FOREIGN.union({f"--{name}" for name in OTHER_NAMES}, *found)


@cache
def targets_of_make() -> set[str]:
    rules = "\n".join(path.read_text() for path in [ROOT / "Makefile", *ROOT.glob("**/*.mk")])
    return set(re.findall(r"^([\w-]+):", rules, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    """`moebius NAME --option`: the command has the option; a lone `--option` is one of some command's."""
    root, everywhere = all_commands(), options_of_any()
    for code in code_of(page):
        said = COMMAND.search(code)
        if said is None:
            if code.startswith("--"):
                assert set(OPTION.findall(code)) <= everywhere, code
            continue
        command, words = root, said[1].partition("#")[0].split()
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        # A group that is named alone, or with a choice (`record start|stop`).
        names = words[0].split("|") if words and hasattr(command, "commands") else []
        assert set(names) <= set(getattr(command, "commands", {})) | {"…", "..."}, code
        if not hasattr(command, "commands"):
            assert set(OPTION.findall(" ".join(words))) <= options_of(command) | FOREIGN, code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_exist(page: Path) -> None:
    targets = targets_of_make()
    for code in code_of(page):
        for named in re.findall(r"(?:^|[\s(])make ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)*)", code):
            assert set(named.split()[:1]) <= targets, code


def test_packages_of_the_structure_exist() -> None:
    """Each name in the first column of the table, a leading dot being the one before it."""
    table = (ROOT / "docs" / "structures.md").read_text().partition("## The life")[0]
    last = ""
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            last = last.rsplit(".", 1)[0] + name if name.startswith(".") else name
            place = last if "/" in last else last.replace(".", "/")
            assert place in FOLDERS or f"{place}.py" in TRACKED, last
