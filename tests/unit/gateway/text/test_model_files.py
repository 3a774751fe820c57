"""A tokenizer that was read before a process was forked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.text.model_files import forget_tokenizer, keep_tokenizer, read_tokenizer
from gateway.text.tokenizer import TokenizerError
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


def test_what_fits_a_model_fits_one_with_more_rows_only(tmp_path: Path) -> None:
    """That a tokenizer was found to fit is remembered, and answers for no smaller model."""
    byte_level_tokenizer(300).save(str(tmp_path / "tokenizer.json"))
    tokenizer = keep_tokenizer(str(tmp_path), "")
    for vocab_size in (400, 400, 500):
        tokenizer.check_fits(vocab_size)
    with pytest.raises(TokenizerError, match="vocab_size is 200"):
        tokenizer.check_fits(200)
