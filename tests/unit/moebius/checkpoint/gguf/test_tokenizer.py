"""Invariant: a tokenizer made from GGUF metadata gives transformers' ids, and without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as BackendTokenizer

from gateway.text.tokenizer import Tokenizer, TokenizerError
from moebius.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from moebius.checkpoint.gguf.tokenizer import read_tokenizer
from tests.helpers.gguf_tokenizers import write_byte_level, write_sentencepiece
from tests.helpers.tiny_tokenizer import BOS, CORPUS, EOS, byte_level_tokenizer, write_tokenizer

TEXTS = [
    *CORPUS[:3],
    "I'll say: WE'RE HERE, don't; HelloWorld camelCase x123456.78e9\r\n\r\n  indented\ttabs   and   ",
    "/path/to/file.py?query=1&b=2//comment\n\n\n#end",
    f"{BOS}user\nhi{EOS} after",
    "中文123字 かな カナ 한국어 русский ١٢٣٤",
]
# Those that transformers cuts as well; two of them composed, which it leaves out.
KNOWN_THERE = ("gpt-4o", "llama-bpe", "minimax-m2", "qwen2")
WORDS = ["\u2581the", "\u2581quick", "\u2581fox", "\u2581then", "er", "own"]


@pytest.fixture(scope="module")
def backend() -> BackendTokenizer:
    return byte_level_tokenizer()


def theirs(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("pre", KNOWN_THERE)
def test_ids_are_those_of_transformers(pre: str, tmp_path: Path, backend: BackendTokenizer) -> None:
    path = write_byte_level(tmp_path / "m.gguf", backend, pre)
    ours, reference = Tokenizer.from_dir(path), theirs(path)
    for text in TEXTS:
        composed = text.replace("e\u0301", "é")
        assert ours.encode(composed) == reference(composed)["input_ids"]


def test_letters_keep_their_marks_as_in_the_published_tokenizer(
    tmp_path: Path, backend: BackendTokenizer
) -> None:
    """Qwen3.5's way, which transformers has as a class of its own and does not read from GGUF files."""
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    path = write_byte_level(tmp_path / "m.gguf", backend, "qwen35")
    reference: Any = Qwen3_5Tokenizer()._tokenizer.pre_tokenizer
    for text in (*TEXTS, "कार्य क्षमता 12 नमस्ते", "e\u0301a ไทยน้ำ"):
        assert PRE_TOKENIZERS["qwen35"].splitter.pre_tokenize_str(text) == reference.pre_tokenize_str(text)
    marked, plain = (PRE_TOKENIZERS[name].splitter for name in ("qwen35", "qwen2"))
    assert marked.pre_tokenize_str("कार्य") != plain.pre_tokenize_str("कार्य"), "texts should tell them apart"
    assert Tokenizer.from_dir(path).encode("fox")


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    """Merges follow from scores, spaces become part of pieces, and what no piece covers becomes bytes."""
    path = write_sentencepiece(tmp_path / "m.gguf", WORDS)
    ours, reference = Tokenizer.from_dir(path), theirs(path)
    for text in ("the quick fox then owner", "thethe  quick", "a fox: 東!"):
        found = ours.encode(text, add_special_tokens=False)
        assert found == reference(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.encode("the quick 東 fox")) == "the quick 東 fox"
    # As llama.cpp has it, a space is also put before what follows a special token.
    the = ours.encode("the", add_special_tokens=False)
    assert ours.encode(f"the{EOS}the", add_special_tokens=False) == [*the, 2, *the]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_way_of_cutting_keeps_the_text(pre: str, tmp_path: Path, backend: BackendTokenizer) -> None:
    """Pieces leave nothing out: decoding gives back what was encoded, composed where the family composes."""
    import unicodedata

    ours = Tokenizer.from_dir(write_byte_level(tmp_path / "m.gguf", backend, pre))
    for text in TEXTS:
        wanted = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].composes else text
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == wanted


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", " %%", " 字x"]),
        ("glm4", ["It", "'s", " ", "123", "45", " %%", " 字x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " %%", " 字x"]),
        ("deepseek-v3", ["It", "'s", " ", "123", "45", " %%", " ", "字", "x"]),
        ("kimi-k2", ["It's", " ", "123", "45", " %%", " ", "字", "x"]),
        ("gpt-4o", ["It's", " ", "123", "45", " %%", " 字x"]),
        ("hy_v4", ["It", "'s", " ", "123", "45", " %%", " ", "字", "x"]),
        ("laguna", ["It", "'s", " ", "1", "2", "3", "4", "5", " %%", " 字x"]),
        ("bailingmoe2", ["It", "'s", " ", "1", "2", "3", "4", "5", " %%", " 字x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " %%", " 字x"]),
    ],
)
def test_pieces_of_each_way(pre: str, pieces: list[str], backend: BackendTokenizer) -> None:
    """What tells the ways apart: contractions, digits, and scripts without spaces."""
    text = "It's 12345 %% 字x"
    cut = PRE_TOKENIZERS[pre].splitter.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


def test_special_tokens_template_and_first_token(tmp_path: Path, backend: BackendTokenizer) -> None:
    """Control tokens are special, those of users are not; a first token is implied where the file says so."""
    path = write_byte_level(tmp_path / "m.gguf", backend, "qwen2", add_bos_token=True)
    ours = Tokenizer.from_dir(path)
    begin, end = backend.token_to_id(BOS), backend.token_to_id(EOS)
    tool = backend.token_to_id("<tool call>")
    assert {begin, end} <= ours.special_ids
    assert tool not in ours.special_ids
    assert tool in ours.encode("a<tool call>b")
    assert ours.encode("fox")[0] == begin
    assert ours.encode("fox", add_special_tokens=False)[0] != begin
    assert ours.is_byte_level
    assert ours.chat_template is not None
    text = ours.chat_template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == f"{BOS}user\nhi{EOS}\n{BOS}assistant\n"
    sentencepiece = Tokenizer.from_dir(write_sentencepiece(tmp_path / "s.gguf", WORDS))
    assert sentencepiece.piece(sentencepiece.encode("the")[0]) == BOS


def test_files_next_to_the_model_count_first(tmp_path: Path, backend: BackendTokenizer) -> None:
    """They are the publisher's own, whichever part of the model the path names."""
    path = write_byte_level(tmp_path / "m.gguf", backend, "unheard-of")
    with pytest.raises(TokenizerError, match=r"pre is 'unheard-of'; allowed: .*qwen2.*next to"):
        Tokenizer.from_dir(path)
    write_tokenizer(tmp_path, byte_level_tokenizer(300))
    assert Tokenizer.from_dir(path).vocab_size == Tokenizer.from_dir(tmp_path).vocab_size <= 301


def test_what_is_missing_or_unknown_is_named(tmp_path: Path, backend: BackendTokenizer) -> None:
    path = write_byte_level(tmp_path / "m.gguf", backend, "qwen2")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"gpt2", b"bert"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model is 'bert'; allowed: gpt2, llama"):
        Tokenizer.from_dir(path)
    path.write_bytes(content.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.marges"))
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.ggml\.merges"):
        Tokenizer.from_dir(path)


def test_no_torch_is_needed(tmp_path: Path, backend: BackendTokenizer) -> None:
    """The gateway reads a tokenizer without it, and without the package that knows quantisation types."""
    path = write_byte_level(tmp_path / "m.gguf", backend, "qwen2")
    assert read_tokenizer(path).named_tokens["eos_token"] == EOS
    code = (
        "import sys\nfrom pathlib import Path\nfrom gateway.text.tokenizer import Tokenizer\n"
        f"Tokenizer.from_dir(Path({str(path)!r}))\n"
        "sys.exit(str({'torch', 'gguf', 'transformers'} & set(sys.modules)) if "
        "{'torch', 'gguf', 'transformers'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
