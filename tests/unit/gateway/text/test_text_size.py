"""Guards that a text is refused by its size only when its tokens could never fit."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from gateway.text.tokenizer import TextSize
from gateway.text.tokenizer import Tokenizer as ServedTokenizer
from moebius.checkpoint.byte_level import bytes_to_piece
from tests.helpers.tiny_tokenizer import EOS, byte_level_tokenizer, metaspace_tokenizer


def composing() -> Tokenizer:
    """Composes characters first, which shortens text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def stripping() -> Tokenizer:
    """Returns an added token that takes the white space around it."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|wide|>", lstrip=True, rstrip=True)])
    return tokenizer


def lacking() -> Tokenizer:
    """Trained on clean text: neither control characters nor Hangul were in it, nor any `T`."""
    described = json.loads(byte_level_tokenizer().to_str())
    missing = {bytes_to_piece(bytes((byte,))) for byte in (*range(9), 0xED, 0xED - 1, ord("T"))}
    vocab, merges = described["model"]["vocab"], described["model"]["merges"]
    described["model"]["vocab"] = {
        piece: number for piece, number in vocab.items() if not missing & set(piece) or piece.startswith("<")
    }
    described["model"]["merges"] = [pair for pair in merges if not missing & set("".join(pair))]
    return Tokenizer.from_str(json.dumps(described))


MADE = (byte_level_tokenizer, metaspace_tokenizer, composing, stripping, lacking)
TOKENIZERS = {f.__name__: f() for f in MADE}
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8), st.sampled_from([EOS, "<|wide|>", " " * 30, " punctuation", "한글", "The"])
    ),
    max_size=12,
).map("".join)


@given(text=TEXTS, name=st.sampled_from(sorted(TOKENIZERS)))
def test_no_text_has_fewer_tokens_than_its_size_says(text: str, name: str) -> None:
    """The bound is one: for composed and decomposed text, special tokens and white space."""
    backend = TOKENIZERS[name]
    size = TextSize.of(backend)
    assert size.longest is not None
    for form in (text, unicodedata.normalize("NFD", text)):
        assert size.least_tokens(form) <= len(backend.encode(form, add_special_tokens=False).ids)


def test_bytes_that_a_vocabulary_lacks_are_not_counted() -> None:
    """All the rest is, so that what cannot fit is refused unread there, too."""
    size = TextSize.of(TOKENIZERS["lacking"])
    assert size.longest is not None
    assert size.least_tokens("T" * 10**6) == 0
    assert size.least_tokens("xT" * 10**6) == size.least_tokens("x" * 10**6) > 10_000


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Replace("a", "")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])},
        {"pre_tokenizer": pre_tokenizers.Split("a", "removed")},
        {"model": models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True)},
    ],
    ids=["replaced", "stripped", "removed", "unknown"],
)
def test_tokenizers_that_drop_text_give_no_bound(change: dict[str, object]) -> None:
    """Where a million characters can be one token, none is refused for its size."""
    backend = metaspace_tokenizer()
    for name, stage in change.items():
        setattr(backend, name, stage)
    assert TextSize.of(backend).least_tokens("a" * 10**6) == 0


def test_truncation_for_training_does_not_shorten_prompts() -> None:
    """Some tokenizer files have truncation set; a prompt cut off in silence would be another prompt."""
    backend = byte_level_tokenizer()
    backend.enable_truncation(4)
    assert len(ServedTokenizer(backend, None).encode("The quick brown fox jumps over the lazy dog")) > 4
