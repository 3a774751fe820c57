"""Invariant: an option that does not exist is answered with those that mean the same, or the way to all."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import typer

import lab.commands
from app import cli
from app.option_hints import LAB_COMMANDS, suggestions, unknown_command
from moebius import __version__
from moebius.config.loader import leaves

ROOT = Path(__file__).resolve().parents[3]
PROJECTS = ("pyproject.toml", "lab/pyproject.toml")

KNOWN = {leaf.flag: leaf.description for leaf in leaves()}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--gpu-layer-count", "--gpu-layers"),
        ("--kv-cache-format", "--kv-cache-dtype"),
        ("--expert-bits", "--expert-dtype"),
        ("--moe-threads", "--expert-threads"),
        ("--prompt-chunk", "--prefill-chunk-max"),
        ("--max-num-seq", "--max-num-seqs"),
        ("--expert-dtpye", "--expert-dtype"),
    ],
)
def test_what_was_meant_is_among_the_suggestions(typed: str, meant: str) -> None:
    """Words count, whichever letters they have; a slip of the keyboard has one answer."""
    assert meant in suggestions(typed, KNOWN)


def test_letters_alone_suggest_nothing() -> None:
    """`--split-count` was suggested for `--gpu-layer-count`; nonsense gets no suggestion."""
    assert "--split-count" not in suggestions("--gpu-layer-count", KNOWN)
    assert suggestions("--frobnicate", KNOWN) == []


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("serve", "demo", "--gpu-layer-count", "3"), "did you mean --gpu-layers"),
        (("topology", "--frobnicate"), "topology --help lists its options"),
    ],
)
def test_the_command_line_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], wanted: str
) -> None:
    """The line comes with status 2, before anything is loaded."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(list(arguments))
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert wanted in error
    assert error.count("\n") == 1


def test_commands_of_measuring_are_named_where_it_is_not_installed() -> None:
    """The table of commands that `lab` adds is the one that it adds, and the hint says where they are."""
    root, benchmarks, models = typer.Typer(), typer.Typer(), typer.Typer()
    lab.commands.register(root, benchmarks, models)
    groups = {"moebius": root, "moebius bench": benchmarks, "moebius models": models}
    added = {
        path: {cli.name_of(command) for command in group.registered_commands}
        for path, group in groups.items()
    }
    assert added == LAB_COMMANDS
    assert "moebius-lab" in str(unknown_command("No such command 'kernels'.", "moebius bench"))


def test_both_distributions_have_one_version() -> None:
    """`moebius-lab` asks for the version of `moebius` that it was written with."""
    own, measuring = (tomllib.loads((ROOT / name).read_text())["project"] for name in PROJECTS)
    assert measuring["version"] == own["version"] == __version__
    assert measuring["dependencies"] == [f"moebius=={__version__}"]
