"""Guards incremental detokenisation: pieces join to the full text and never break a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.tokenizer import (
    ByteLevelDetokenizer,
    Tokenizer,
    TokenizerError,
    WindowDetokenizer,
    make_detokenizer,
)
from tests.helpers.tiny_tokenizer import BOS, EOS, byte_level_tokenizer, metaspace_tokenizer, write_tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer(), None)
METASPACE = Tokenizer(metaspace_tokenizer(), None)
# Characters of one to four bytes, joined emoji, combining marks, and text either vocabulary merges.
TEXTS = st.lists(
    st.one_of(
        st.sampled_from("the fox \n\t"),
        st.sampled_from(["é", "e\u0301", "東", "😀", "👩\u200d👩\u200d👧", "\U0001f1e9\U0001f1ea", "\u0000"]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
).map("".join)


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    """Returns the text of each step, and of the flush."""
    detokenizer = make_detokenizer(tokenizer, skip)
    return [*(detokenizer.step(token) for token in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=60), st.booleans())
def test_byte_level_pieces_join_to_full_decoding(ids: list[int], skip: bool) -> None:
    """For any ids, valid UTF-8 or not, known or not, the pieces join to what `tokenizers` decodes at once."""
    assert "".join(pieces(BYTE_LEVEL, ids, skip)) == BYTE_LEVEL.decode(ids, skip)


@given(TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "metaspace"])
def test_text_comes_back_without_broken_characters(tokenizer: Tokenizer, text: str) -> None:
    """Encoded text comes back piece by piece, and no piece shows half a character."""
    ids = tokenizer.encode(text)
    given_out = pieces(tokenizer, ids, True)
    assert "".join(given_out) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in given_out)


def test_each_vocabulary_gets_its_detokenizer() -> None:
    """The exact byte path is taken where it is exact, the window elsewhere."""
    assert isinstance(make_detokenizer(BYTE_LEVEL, True), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(METASPACE, True), WindowDetokenizer)


def test_special_tokens_are_skipped_or_shown() -> None:
    """Special tokens vanish or show by choice; added tokens that are not special always show."""
    tokenizer = BYTE_LEVEL
    ids = tokenizer.encode(f"fox{EOS}<tool call>{BOS}dog")
    assert "".join(pieces(tokenizer, ids, True)) == "fox<tool call>dog"
    assert "".join(pieces(tokenizer, ids, False)) == f"fox{EOS}<tool call>{BOS}dog"


def test_window_keeps_spaces_after_special_tokens_and_prompts() -> None:
    """A leading space belongs to the text unless the text begins there: after a prompt it must stay."""
    ids = METASPACE.encode("fox")
    assert "".join(pieces(METASPACE, ids, True)) == "fox"
    after_prompt = make_detokenizer(METASPACE, True, METASPACE.encode("the"))
    assert "".join([*(after_prompt.step(token) for token in ids), after_prompt.flush()]) == " fox"


def test_incomplete_character_is_held_then_replaced() -> None:
    """The first bytes of an emoji give nothing until the rest comes; at the end they give U+FFFD."""
    ids = BYTE_LEVEL.encode("\U00010348")  # not in the training text, so one token per byte
    assert len(ids) == 4
    assert pieces(BYTE_LEVEL, ids, True) == ["", "", "", "\U00010348", ""]
    assert pieces(BYTE_LEVEL, ids[:3], True) == ["", "", "", "\ufffd"]


@given(TEXTS)
def test_token_bytes_join_to_the_text(text: str) -> None:
    """The bytes given with log-probabilities are exactly the text's."""
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(BYTE_LEVEL.token_bytes(token) for token in ids) == text.encode()


def test_tokenizer_errors_name_the_file(tmp_path: Path) -> None:
    """A missing or broken file is named."""
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a readable"):
        Tokenizer.from_dir(tmp_path)
    write_tokenizer(tmp_path, byte_level_tokenizer())
    with pytest.raises(TokenizerError, match=r"missing\.jinja"):
        Tokenizer.from_dir(tmp_path, str(tmp_path / "missing.jinja"))
