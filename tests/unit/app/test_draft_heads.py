"""Guards where a draft head is looked for: beside MODEL, before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.commands.models import with_checkpoint
from lab.bench.speculation import with_method
from moebius.config import MoebiusConfig
from moebius.config.loader import load_config
from moebius.errors import UserError
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model("qwen3_moe", directory)
    return directory


def config_of(model: Path, head: str) -> MoebiusConfig:
    flags = {"model": str(model), "speculative_method": "eagle3", "speculative_model": head}
    return load_config(None, flags)


def test_a_head_is_found_from_the_working_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that are started have other working directories: they are given an absolute path."""
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found = with_checkpoint(config_of(model, "./head"))
    assert found.gpu.speculative_model == str(tmp_path / "head")


def test_a_directory_without_a_head_is_refused(model: Path, tmp_path: Path) -> None:
    """So is a file that is not there; a GGUF file that is becomes an absolute path."""
    message = "no GGUF file, and no config.json in it; allowed: the directory"
    file = tmp_path / "small.gguf"
    for given in (tmp_path, file):
        with pytest.raises(UserError, match=rf"speculative_model .*: {message}"):
            with_checkpoint(config_of(model, str(given)))
    file.touch()
    assert with_checkpoint(config_of(model, str(file))).gpu.speculative_model == str(file)


def test_an_engine_without_drafts_is_compared_without_the_head(model: Path) -> None:
    """A head without its method would be refused."""
    config = config_of(model, "/heads/one")
    assert with_method(config, "off").gpu.speculative_model == ""
    assert with_method(config, "ngram+eagle3").gpu.speculative_model == "/heads/one"
