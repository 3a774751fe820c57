"""Guards `moebius bench load`: its checkpoints can be loaded, its rows are complete, its ratios are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expert_service.loader import plan_load
from lab.bench.load import (
    LoadOptions,
    parse_shape,
    read_speed,
    run,
    write_checkpoint,
)
from lab.random_model.values import FORMATS
from moebius.errors import UserError
from moebius.models.read import read_geometry

SHAPE = parse_shape("128x256x4", layers=2)


@pytest.mark.parametrize("name", list(FORMATS))
def test_checkpoints_are_what_they_are_called(tmp_path: Path, name: str) -> None:
    """The loader packs them in their own format; the bytes counted are those of the tensors."""
    written = write_checkpoint(tmp_path, SHAPE, name)
    plan = plan_load(read_geometry(tmp_path), str(tmp_path))
    assert plan.weight_format == name
    assert written == sum(info.nbytes for info in plan.checkpoint.layout.index.tensors.values())


def test_every_byte_is_read(tmp_path: Path) -> None:
    """Files of odd sizes, more threads than chunks: the limits count what they read, and raise otherwise."""
    for number, size in enumerate((1, 3 << 20, (1 << 20) + 17)):
        (tmp_path / f"{number}").write_bytes(bytes(size))
    files = sorted(tmp_path.iterdir())
    for keep in (False, True):
        assert read_speed(files, 8, keep=keep) > 0


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per format and type; ratios follow from the speeds; requantising reports its error."""
    target = tmp_path / "rows.json"
    options = LoadOptions(SHAPE, ("bfloat16",), ("keep", "int4"), threads=2, repeats=1, directory=tmp_path)
    run(options, target)
    rows = json.loads(target.read_text())
    assert [(row["source_format"], row["expert_dtype"]) for row in rows] == [
        ("bfloat16", "keep"),
        ("bfloat16", "int4"),
    ]
    for row in rows:
        assert row["source_bytes"] == 2 * (3 * 128 * 256) * 4 * 2
        assert row["bytes_per_second"] == pytest.approx(row["source_bytes"] / row["seconds"])
        assert row["ratio"] == pytest.approx(row["bytes_per_second"] / row["read_bytes_per_second"])
        assert row["ratio_kept"] == pytest.approx(row["bytes_per_second"] / row["kept_bytes_per_second"])
        assert row["packed_bytes"] > 0
    assert rows[0]["relative_error"] == 0.0
    assert 0.05 < rows[1]["relative_error"] < 0.1
    assert "bfloat16" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.parametrize("text", ["2048x768", "axbxc", "0x1x1"])
def test_bad_shapes_are_named(text: str) -> None:
    """The option, what was given and what is allowed."""
    with pytest.raises(UserError, match=f"--shape: '{text}' is not allowed; allowed: HxIxE"):
        parse_shape(text, 1)


def test_bad_choices_are_named(tmp_path: Path) -> None:
    """Formats, types and directories."""
    with pytest.raises(UserError, match="--format: 'fp5' is not allowed; allowed: bfloat16"):
        run(LoadOptions(SHAPE, ("fp5",)))
    with pytest.raises(UserError, match="--expert-dtype: 'int3' is not allowed; allowed: keep"):
        run(LoadOptions(SHAPE, ("bfloat16",), ("int3",)))
    with pytest.raises(UserError, match=r"--directory .*missing"):
        run(LoadOptions(SHAPE, ("bfloat16",), directory=tmp_path / "missing"))
