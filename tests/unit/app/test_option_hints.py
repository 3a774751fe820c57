"""Invariant: an option that does not exist is answered with those that mean the same, or the way to all."""

from __future__ import annotations

import pytest

from app import cli
from app.option_hints import suggestions
from moebius.config_loader import leaves

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
    """With status 2, before anything is loaded."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(list(arguments))
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert wanted in error
    assert error.count("\n") == 1
