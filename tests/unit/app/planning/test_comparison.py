"""Guards plans side by side: what counts as the best, machines by their names, what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.planning.comparison import machines
from app.planning.hardware import HardwareOptions
from lab.random_model import RandomModelOptions, write_random_model
from moebius.errors import UserError
from tests.helpers.command_line import run_cli


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns two GGUF models of different size in one directory."""
    found = tmp_path_factory.mktemp("models")
    for name, shape in (("small", "small"), ("tiny", "tiny")):
        written = write_random_model(
            found / name, RandomModelOptions(shape, "q4_0"), lambda done, total: None
        )
        files = [written.path] if written.path.is_file() else list(written.path.glob("*.gguf"))
        files[0].rename(found / f"{name}-Q4_0.gguf")
    return found


def plan(*arguments: str) -> tuple[int, str, str]:
    """Returns the command: (status, stdout, stderr)."""
    return run_cli("plan", *arguments, "--cores", "16")


def test_machines_are_gpus_and_ram() -> None:
    """What a machine does not say is as the other options have it; nonsense is refused by name."""
    options = HardwareOptions(ram_gib=32, cores=8)
    found = machines("4090@64,none", options)
    assert found["4090@64"] == HardwareOptions(gpus="4090", ram_gib=64, cores=8)
    assert found["none"] == HardwareOptions(gpus="none", ram_gib=32, cores=8)
    for text in ("@64", "4090@", "4090@lots", ""):
        with pytest.raises(UserError, match="--compare"):
            machines(text, options)


def test_models_of_a_directory_on_two_machines(directory: Path, tmp_path: Path) -> None:
    """Every model on every machine is a row; the largest that fits is the one whose command is printed."""
    target = tmp_path / "rows.json"
    status, out, err = plan(str(directory), "--compare", "none@64,none@0.1", "--json", str(target))
    assert (status, err) == (0, "")
    rows = json.loads(target.read_text())["rows"]
    assert [(row["name"], row["machine"], row["plan"] is None) for row in rows] == [
        ("small-Q4_0.gguf", "none@64", False),
        ("small-Q4_0.gguf", "none@0.1", True),
        ("tiny-Q4_0.gguf", "none@64", False),
        ("tiny-Q4_0.gguf", "none@0.1", True),
    ]
    assert f"serve with on none@64: moebius serve {directory / 'small-Q4_0.gguf'}" in out


def test_nothing_fits(directory: Path) -> None:
    """The exit status says so, and each row why."""
    status, out, err = plan(str(directory), "--gpus", "none", "--ram", "0.1")
    assert (status, err) == (1, "moebius: does not fit: none of these\n")
    assert out.count("0.1 GiB are allowed") == 2
