"""Guards that `serve` and `plan` say all that is wrong at once, and one problem as it always was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.cli import refuse_unknown_options
from app.commands.plan import check_machines
from app.commands.serve import checked
from app.option_hints import unknown_options
from app.planning.hardware import HardwareOptions
from app.problems import Problems
from app.supervisor import shortages
from app.supervisor.shortages import Needs, Shortage, refuse_shortages
from moebius.checkpoint.errors import CheckpointError
from moebius.config import MoebiusConfig
from moebius.config.loader import load_config
from moebius.errors import ConfigErrors, StartupError, UserError, all_problems


def test_one_problem_stays_what_it_was() -> None:
    """Its type, with its exit status, is that of the check; without any nothing is raised."""
    problems = Problems()
    problems.refuse()
    for _ in range(2):
        with problems.collected():
            raise StartupError("too small")
    with pytest.raises(StartupError, match=r"^too small$"):
        problems.refuse()


def test_several_problems_have_a_line_each() -> None:
    """They stand in the order of the checks, those of an error that names several among them; a defect is not
    collected."""
    problems = Problems()
    with problems.collected():
        raise CheckpointError("no weights")
    with problems.collected():
        raise all_problems(["a", "b"])
    assert problems
    with pytest.raises(ConfigErrors) as raised:
        problems.refuse()
    assert raised.value.details == ("no weights", "a", "b")
    assert raised.value.summary == "3 problems have to be solved first"
    with pytest.raises(RuntimeError), problems.collected():
        raise RuntimeError


def test_serve_names_everything_that_is_missing(tmp_path: Path) -> None:
    """Model, certificates and keys are checked though another one is wrong."""
    flags = {"model": str(tmp_path / "none"), "grpc_tls": "tls", "api_key_file": str(tmp_path / "keys")}
    with pytest.raises(ConfigErrors) as raised:
        checked(load_config(flags=flags), dry_run=True)
    begins = [line.split()[0] for line in raised.value.details]
    assert begins == ["grpc_ca_file", "api_key_file:", "MODEL"]


def test_nothing_is_downloaded_for_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model of the hub is looked at without its weights where something else is wrong already."""
    asked = []

    def with_checkpoint(config: MoebiusConfig, needs_weights: bool) -> MoebiusConfig:
        asked.append(needs_weights)
        return config

    monkeypatch.setattr("app.commands.serve.with_checkpoint", with_checkpoint)
    monkeypatch.setattr("app.commands.serve.check_files", lambda config, needs_weights: None)
    checked(load_config(flags={"model": "owner/name"}), dry_run=False)
    with pytest.raises(UserError, match="api_key_file"):
        checked(
            load_config(flags={"model": "owner/name", "api_key_file": str(tmp_path / "keys")}), dry_run=False
        )
    assert asked == [True, False]


def test_all_shortages_of_a_host_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAM and shared memory are both too small: both are said."""
    found = [Shortage("/dev/shm", "little shared memory", "More"), Shortage("RAM", "little RAM", "Less")]
    monkeypatch.setattr(shortages, "needs_of", lambda *arguments: Needs(0, ()))
    monkeypatch.setattr(shortages, "find_shortages", lambda *arguments: iter(found))
    with pytest.raises(ConfigErrors) as raised:
        refuse_shortages(MoebiusConfig(), MoebiusConfig(), None)  # type: ignore[arg-type]
    assert raised.value.details == ("little shared memory. More", "little RAM. Less")


def test_plan_names_all_hardware_that_is_not_known() -> None:
    """On every machine, a GPU that is none hides no instruction set that is none, and what two machines share
    is said once."""
    problems = Problems()
    one = HardwareOptions(gpus="2xnothing", isa="mmx")
    check_machines({"a": one, "b": replace(one, gpus="other")}, problems)
    with pytest.raises(ConfigErrors) as raised:
        problems.refuse()
    assert [line.split()[1] for line in raised.value.details] == ["'2xnothing'", "'mmx'", "'other'"]


def test_all_unknown_options_are_named() -> None:
    """Values are no options, whatever they begin with, nor is what follows `--`; each has its hint."""
    options = {"--port": True, "--dry-run": False}
    known = {"--port": "Port", "--dry-run": ""}
    words = ["M", "--prot", "1", "--port", "--strange", "--dry-run", "--other=3", "--port=2", "--", "--last"]
    assert unknown_options(words, options, known, "moebius serve") == [
        "moebius serve has no option --prot; did you mean --port?",
        "moebius serve has no option --other; moebius serve --help lists its options",
    ]


def test_a_single_unknown_option_needs_no_summary() -> None:
    """One line is written for one."""
    command = type("Command", (), {"params": ()})()
    with pytest.raises(
        UserError, match=r"^moebius serve has no option --x; moebius serve --help lists its options$"
    ):
        refuse_unknown_options(["serve", "--x"], {}, command)
    with pytest.raises(ConfigErrors, match="2 options do not exist"):
        refuse_unknown_options(["serve", "--x", "--y"], {}, command)
    refuse_unknown_options(["serve", "MODEL"], {}, command)
