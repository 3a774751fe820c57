"""Invariant: a checkpoint with `tiktoken.model` alone gives the ids that joining bytes by rank gives."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from gateway.text.tokenizer import Tokenizer, TokenizerError
from lab.verify.run import read_tokens
from moebius.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from moebius.checkpoint.tiktoken_vocabulary import FILE

# Longer ones have ranks of their own order: "quick" is no token, though its parts are; "then" can be joined
# in two ways; "owner" is taken whole, for no pair of tokens makes it.
_LONGER = (
    "th",
    "en",
    "he",
    "the",
    "then",
    "qu",
    "ck",
    "ic",
    "ick",
    " t",
    " the",
    "aa",
    "aaa",
    "owner",
    "中",
    "文字",
)
TOKENS = [bytes([byte]) for byte in range(256)] + [token.encode() for token in _LONGER]
NAMED = {len(TOKENS): ("[BOS]", True), len(TOKENS) + 3: ("<think>", False)}
TEXTS = [
    "then the quick owner, THEN aaaa aaaaa aaaaaa the end",
    "It's 12345 %% 中文字x; 文字字",
    "Größe\r\n\r\n  naïve café 😀 \t x",
]


def _write(directory: Path, model_type: str = "kimi_k25") -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(TOKENS)]
    (directory / FILE).write_text("\n".join(lines) + "\n")
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    decoder = {
        str(number): {"content": content, "special": special} for number, (content, special) in NAMED.items()
    }
    settings = {"added_tokens_decoder": decoder, "bos_token": "[BOS]", "chat_template": "{{ bos_token }}hi"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _joined(piece: bytes) -> list[int]:
    """Tiktoken's rule: a piece that is a token, else the leftmost pair of lowest rank, again and again."""
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while True:
        pairs = [(ranks.get(parts[at] + parts[at + 1]), at) for at in range(len(parts) - 1)]
        known = [(rank, at) for rank, at in pairs if rank is not None]
        if not known:
            return [ranks[part] for part in parts]
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_joining_by_rank(text: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(_write(tmp_path))
    cut = PRE_TOKENIZERS["kimi-k2"].splitter.pre_tokenize_str(text)
    wanted = [number for _, (begin, end) in cut for number in _joined(text[begin:end].encode())]
    assert tokenizer.encode(text) == wanted
    assert tokenizer.decode(wanted) == text
    assert b"".join(tokenizer.token_bytes(number) for number in wanted) == text.encode()


def test_special_tokens_have_their_ids(tmp_path: Path) -> None:
    """There are named ones, those that decoding keeps, and as many reserved ones as the family has."""
    tokenizer = Tokenizer.from_dir(_write(tmp_path))
    first = len(TOKENS)
    assert tokenizer.vocab_size == first + 258
    assert tokenizer.encode("[BOS]the<think>") == [first, TOKENS.index(b"the"), first + 3]
    assert first in tokenizer.special_ids
    assert first + 3 not in tokenizer.special_ids
    assert tokenizer.piece(first + 257) == f"<|reserved_token_{first + 257}|>"
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([], add_generation_prompt=False) == "[BOS]hi"


def test_no_token_is_after_the_models_last_row(tmp_path: Path) -> None:
    """The family counts two special tokens more than there are rows."""
    last = len(TOKENS) + 256
    (_write(tmp_path) / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "vocab_size": last}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.vocab_size == last
    assert max(tokenizer.encode(f"<|reserved_token_{last}|>")) < last


def test_verification_reads_it_too(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the then")
    found = read_tokens(_write(tmp_path), text, 10, 1000)
    assert (found.source, found.ids.tolist()) == (
        "tokenizer",
        Tokenizer.from_dir(tmp_path).encode("the then"),
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (FILE, "aGk= 0\n!!! 1\n", r"tiktoken\.model, line 2: not a token and its rank"),
        (FILE, "aGk= 1\n", r"tiktoken\.model: ranks are not the numbers from 0 to 0"),
        ("config.json", '{"model_type": "mixtral"}', "'mixtral' cuts text is not known.*kimi_k2, kimi_k25"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"272": {}}}', "does not name special tokens"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"273": {"content": "<|reserved_token_272|>"}}}',
            "special token .* cannot have id 273",
        ),
    ],
)
def test_what_is_wrong_is_named(file: str, content: str, message: str, tmp_path: Path) -> None:
    (_write(tmp_path) / file).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_dir(tmp_path)


def test_a_tokenizer_json_counts_first(tmp_path: Path) -> None:
    (_write(tmp_path) / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_dir(tmp_path)
