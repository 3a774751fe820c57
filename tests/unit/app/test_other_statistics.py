"""Guards that counts of other servers become ours, and that files of another kind or model are refused, as
adapters are in place of a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app import cli
from app.other_statistics import read_other_statistics
from moebius.errors import UserError
from moebius.experts.placement import ExpertStatistics
from moebius.models.read import read_geometry
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, of which the first is dense, of 10 experts."""
    directory = tmp_path_factory.mktemp("counted")
    make_tiny_model("glm4_moe", directory)
    return directory


def saved(path: Path, content: Any) -> Path:
    """The file as `torch.save` writes it."""
    torch.save(content, path)
    return path


def test_counts_of_others_are_read(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of all layers or of those with experts, in samples or summed, as a dict or a tensor, become the
    file that --expert-statistics reads."""
    geometry = read_geometry(model)
    assert (geometry.moe_layers, geometry.num_experts) == ((1, 2), 10)
    counts = torch.arange(30).reshape(3, 10)
    for content in (
        {"rank": 0, "logical_count": torch.stack([counts, counts * 2])},
        counts * 3,
        {"logical_count": counts[1:].float() * 3},
    ):
        found = read_other_statistics(saved(tmp_path / "a.pt", content), geometry)
        assert np.array_equal(found.counts, counts[1:].numpy() * 3)
    target = tmp_path / "counts.json"
    words = ["experts", "record", "import", str(model), str(tmp_path / "a.pt"), "--file", str(target)]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0
    written = ExpertStatistics.read(str(target))
    written.check_model(geometry, "")
    assert np.array_equal(written.counts, counts[1:].numpy() * 3)
    assert "2 layers" in capsys.readouterr().out


class Code:
    """What a file of `torch.save` could run when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"logical": torch.zeros(3, 10)}, "has logical; needed: logical_count"),
        (torch.zeros(3, 9), "3 layers with 9 experts; the model has 2 or 3 layers with 10"),
        (torch.zeros(4, 10), "4 layers with 10 experts"),
        (torch.zeros(10), r"has to be a tensor \[layers, experts\]"),
        (-torch.ones(3, 10), "numbers from 0 on"),
        (Code(), "not a file of torch.save with tensors alone"),
    ],
)
def test_other_files_are_refused(
    model: Path, tmp_path: Path, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line that says what is wrong; no code of a file is run."""
    path = saved(tmp_path / "b.pt", content)
    with pytest.raises(UserError, match=message):
        read_other_statistics(path, read_geometry(model))
    assert "ran" not in capsys.readouterr().out


def test_an_adapter_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its directory is named as what it is, and what to do with it."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "o/n"}')
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(tmp_path), "--gpus", "none", "--ram", "8"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "this is an adapter (adapter_config.json), not a model: merge it" in said
