"""Guards where `moebius serve` keeps files and batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.supervisor.batch_directory import batch_directory
from app.supervisor.plan import plan_processes
from moebius.config.loader import load_config
from tests.unit.app.supervisor.test_plan import MODEL


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state directory, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "state"


def test_a_served_name_has_one_directory_on_every_port(tmp_path: Path, state: Path) -> None:
    """A restart on another port finds its batches; planning creates nothing; `off` reaches the gateway."""
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))

    def planned(**flags: str) -> str:
        given = {"model": str(model), "port": "0", "state_dir": str(tmp_path / "s"), **flags}
        return plan_processes(load_config(None, given)).config.gateway.batch_dir

    first = planned()
    assert Path(first).parent == state / "moebius" / "batches"
    assert Path(first).name.startswith("my-model-")
    assert planned() == first
    assert planned(served_model_name="other") != first
    assert (planned(batch_dir="off"), planned(batch_dir="/data")) == ("off", "/data")
    assert list(state.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["org/model", "..", "x" * 400, "ü" * 200])
def test_names_stay_below_the_directory(name: str, state: Path) -> None:
    """A name is one directory's, whatever is in it."""
    found = Path(batch_directory("", name))
    assert found.resolve().parent == state / "moebius" / "batches"
    found.mkdir(parents=True)


def test_names_that_begin_alike_differ() -> None:
    """Two models never share files because their names were shortened."""
    assert batch_directory("", "x" * 400) != batch_directory("", "x" * 401)
    assert batch_directory("", "a/b") != batch_directory("", "a%2Fb")


def test_a_user_without_a_place_has_none(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that cannot be written does not prevent the start."""
    monkeypatch.setattr("os.access", lambda *_: False)
    assert batch_directory("", "m") == ""
