"""Invariant: `plan` and `serve --dry-run` refuse what `serve` refuses, in its words, and read no weight.

What the services say of the same files is what `test_spoilt_checkpoints` and its like assert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app import cli
from expert_service.loader import plan_load
from gpu_service.loader.load import load_weights
from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.models.read import read_geometry, read_model_config
from tests.helpers import spoilt_checkpoints as spoil
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model
from tests.helpers.tiny_tokenizer import CHAT_TEMPLATE, byte_level_tokenizer, write_tokenizer

Tensors = dict[str, torch.Tensor]
HOST = (
    "--gpus",
    "none",
    "--ram",
    "16",
    "--sockets",
    "1",
    "--cores",
    "8",
    "--bandwidth",
    "100",
    "--isa",
    "amx",
)
VOCAB = 320
EXPERT = "model.layers.2.mlp.experts.6.up_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint with a tokenizer that fits it."""
    directory = tmp_path_factory.mktemp("saved")
    tiny = TINY_MODELS["qwen3_moe"]
    write_tiny_model(replace(tiny, changes=tiny.changes | {"vocab_size": VOCAB}), directory, seed=1)
    return write_tokenizer(directory, byte_level_tokenizer(VOCAB - 20))


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Returns the one line that a command ends with; empty: it is content."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert bool(exit_info.value.code) == bool(error)
    assert error.count("\n") <= 1, error
    return error.removeprefix("moebius: error: ").strip()


def of_services(directory: Path) -> str:
    """What the first service says that does not load."""
    try:
        plan_load(read_geometry(directory), str(directory))
        load_weights(build_model(read_model_config(directory)), directory)
    except CheckpointError as error:
        return str(error)
    return ""


def edited(edit: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def spoil_file(directory: Path) -> None:
        tensors = load_file(directory / spoil.SINGLE)
        edit(tensors)
        save_file(tensors, directory / spoil.SINGLE)

    return spoil_file


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "expert_missing": (edited(lambda t: t.pop(EXPERT)), f"{EXPERT}' is missing"),
    "expert_misshapen": (edited(lambda t: t.update({EXPERT: torch.ones(20, 47)})), "[20, 47]"),
    "expert_too_many": (
        edited(lambda t: t.update({EXPERT.replace("experts.6", "experts.7"): torch.ones(20, 48)})),
        "would be left unused",
    ),
    "dense_missing": (edited(lambda t: t.pop("model.norm.weight")), "1 missing: model.norm.weight"),
    "dense_unused": (edited(lambda t: t.update({"model.extra": torch.ones(2)})), "1 unused: model.extra"),
    "other_vocabulary": (
        edited(lambda t: t.update({"lm_head.weight": torch.ones(VOCAB + 1, 48)})),
        f"lm_head.weight [{VOCAB + 1}, 48] (expected [{VOCAB}, 48])",
    ),
    "truncated": (spoil.truncated, "truncated"),
    "pointer": (spoil.written(spoil.SINGLE, spoil.LFS_POINTER), "run git lfs pull"),
    "header": (spoil.header_too_long, "header of"),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("command", ["plan", "dry_run"])
def test_a_checkpoint_that_would_not_load_is_refused(
    case: str,
    command: str,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoils, message = CASES[case]
    spoils(checkpoint)
    expected = of_services(checkpoint)
    assert message in expected
    monkeypatch.setattr(SliceReader, "_fill", lambda *_: pytest.fail("a weight was read"))
    options = HOST if command == "plan" else ()
    name = "serve" if command == "dry_run" else "plan"
    dry = ("--dry-run",) if command == "dry_run" else ()
    assert refusal(capsys, name, checkpoint, *dry, *options) == expected


def test_a_checkpoint_that_loads_is_planned(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint is planned when nothing is wrong, so that no case above passes for a reason of
    its own.
    """
    assert of_services(checkpoint) == ""
    assert refusal(capsys, "plan", checkpoint, *HOST) == ""


FILES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no_tokenizer": (spoil.removed("tokenizer.json"), ("tokenizer.json", "does not exist")),
    "broken_tokenizer": (
        spoil.written("tokenizer.json", "{"),
        ("tokenizer.json", "not a readable tokenizer"),
    ),
    "tokenizer_pointer": (
        spoil.written("tokenizer.json", spoil.LFS_POINTER),
        ("tokenizer.json", "git lfs pull"),
    ),
    "broken_settings": (spoil.written("tokenizer_config.json", "{"), ("tokenizer_config.json", "JSON")),
    "broken_template": (
        spoil.written("chat_template.jinja", "{{ messages"),
        ("chat_template.jinja", "line 1"),
    ),
    "another_tokenizer": (
        lambda directory: write_tokenizer(directory, byte_level_tokenizer(400)),
        ("another model's", str(VOCAB)),
    ),
}


@pytest.mark.parametrize("case", list(FILES))
@pytest.mark.parametrize("dry_run", [True, False])
def test_files_of_text_are_tried_before_anything_starts(
    case: str, dry_run: bool, checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The files are tried by `serve` itself as well, which leaves no state behind."""
    spoils, named = FILES[case]
    spoils(checkpoint)
    state = tmp_path / "state"
    line = refusal(capsys, "serve", checkpoint, "--state-dir", state, *(("--dry-run",) if dry_run else ()))
    assert all(part in line for part in named), line
    assert not state.exists()


def test_a_template_that_is_given_is_tried(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = checkpoint / "mine.jinja"
    template.write_text("{% if %}")
    line = refusal(capsys, "serve", checkpoint, "--chat-template", template)
    assert line.startswith(f"{template}: chat template, line 1")


@pytest.mark.parametrize("in_chats", [False, True])
def test_a_token_that_is_not_needed_may_lie_outside_the_vocabulary(
    in_chats: bool, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fine-tunes add one for padding to the tokenizer alone; one that chats need is an error."""
    tokenizer = byte_level_tokenizer(VOCAB - 1)
    tokenizer.add_special_tokens(["<pad more>"])
    assert tokenizer.token_to_id("<pad more>") == VOCAB
    write_tokenizer(checkpoint, tokenizer, template="{{ '<pad more>' }}" if in_chats else CHAT_TEMPLATE)
    line = refusal(capsys, "plan", checkpoint, *HOST)
    assert ("'<pad more>' has the id 320" in line) is in_chats
    assert bool(line) is in_chats
