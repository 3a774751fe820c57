"""A tokenizer that was read before a process was forked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.text.model_files import forget_tokenizer, keep_tokenizer, read_tokenizer
from moebius.models.identity import text_parts
from tests.helpers.tiny_tokenizer import byte_level_tokenizer


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    forget_tokenizer()


def test_a_kept_tokenizer_is_found_for_the_same_files_only(tmp_path: Path) -> None:
    """It is the very object, until a file changes, or it is forgotten."""
    directory, file = str(tmp_path), tmp_path / "tokenizer.json"
    byte_level_tokenizer(300).save(str(file))
    parts = text_parts(directory)
    kept = keep_tokenizer(directory, "")
    assert read_tokenizer(directory, "", parts) is kept
    byte_level_tokenizer(310).save(str(file))
    changed = read_tokenizer(directory, "", text_parts(directory))
    assert changed is not kept
    assert changed.vocab_size == kept.vocab_size + 10
    byte_level_tokenizer(300).save(str(file))
    assert read_tokenizer(directory, "", text_parts(directory)) is kept
    forget_tokenizer()
    assert read_tokenizer(directory, "", parts) is not kept
