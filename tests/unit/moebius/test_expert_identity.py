"""Guards what an identity is made of: the same for the same work wherever it is done, else another."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import cli
from moebius.config import PlacementConfig
from moebius.errors import WRONG_IDENTITY_EXIT, WrongIdentity
from moebius.experts.slices import SliceRequest, expert_identity
from moebius.models import identity as identities
from moebius.models.checkpoint import open_index
from moebius.models.identity import checkpoint_fingerprint, identity_part
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint."""
    return TinyMoe(family="glm4_moe").write(tmp_path_factory.mktemp("identity") / "model")


def fingerprint(directory: Path) -> str:
    """Returns the fingerprint of the checkpoint there."""
    return checkpoint_fingerprint(open_index(directory))


def test_a_copy_elsewhere_is_the_same_checkpoint(model: Path, tmp_path: Path) -> None:
    """Neither path nor times nor other files matter: servers of other hosts have copies."""
    copied = tmp_path / "elsewhere"
    shutil.copytree(model, copied)
    (copied / "README.md").write_text("notes")
    for file in copied.iterdir():
        os.utime(file, (1, 1))
    assert fingerprint(copied) == fingerprint(model)


@pytest.mark.parametrize("part", ["first weight", "last weight", "config"])
def test_weights_changed_in_place_are_noticed(model: Path, tmp_path: Path, part: str) -> None:
    """Same names, shapes and sizes."""
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    if part == "config":
        config = changed / "config.json"
        config.write_text(config.read_text().replace('"silu"', '"gelu"'))
        assert config.read_text() != (model / "config.json").read_text()
    else:
        index = open_index(changed)
        infos = sorted(index.tensors.values(), key=lambda info: (str(info.file), info.offset))
        info = infos[0] if part == "first weight" else infos[-1]
        with info.file.open("r+b") as file:
            file.seek(info.offset if part == "first weight" else info.offset + info.nbytes - 1)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    assert fingerprint(changed) != fingerprint(model)


def test_large_files_are_sampled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stays bounded, whatever the checkpoint's size."""
    file = next(iter(open_index(model).tensors.values())).file
    monkeypatch.setattr(identities, "_BLOCK", 16)
    size = file.stat().st_size
    places = identities._spread(size, 5)
    assert [count for _, count in places] == [16] * 5
    assert (places[0][0], places[-1][0]) == (0, size - 16)
    assert identities._spread(60, 5) == [(0, 60)], "a small file is read as a whole"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("expert_split", {"split": "expert"}),
        ("split_shares", {"split_shares": (3, 1)}),
        ("expert_dtype", {"weight_dtype": "int8"}),
        ("top_k", {"top_k": 1}),
        ("resident_experts", {"placement": PlacementConfig(gpu_experts=1, drop_resident="drop")}),
    ],
)
def test_every_setting_that_changes_answers_is_part_of_it(
    model: Path, name: str, change: dict[str, Any]
) -> None:
    """Each setting is there by its name, so that the difference can be seen."""
    geometry = read_geometry(model)
    request = SliceRequest(str(model), split_count=2)
    ours = expert_identity(request, geometry, "aa", exact=False)
    theirs = expert_identity(replace(request, **change), geometry, "aa", exact=False)
    different = {line.partition("=")[0] for line in set(ours.splitlines()) ^ set(theirs.splitlines())}
    assert different == {name}
    assert identity_part(theirs, name) != identity_part(ours, name)


def test_equal_settings_written_otherwise_are_the_same(model: Path) -> None:
    """Equal shares may be left out, and every server of a model has the same identity."""
    geometry = read_geometry(model)
    ours = expert_identity(SliceRequest(str(model), split_count=2), geometry, "aa", exact=False)
    written = SliceRequest("/other/path", split_index=1, split_count=2, split_shares=(1, 1))
    assert expert_identity(written, geometry, "aa", exact=False) == ours
    assert expert_identity(written, geometry, "aa", exact=True) != ours


def test_its_exit_status_is_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor learns that another start will not help."""

    def refuse(*_: Any) -> int:
        raise WrongIdentity("expert server 1 does not fit: expert_dtype is int8, expected keep")

    monkeypatch.setattr(cli, "_run", refuse)
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == WRONG_IDENTITY_EXIT
    assert capsys.readouterr().err.count("\n") == 1
