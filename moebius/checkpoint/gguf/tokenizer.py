"""The tokenizer and chat template that a GGUF model's metadata holds, with the package `tokenizers` alone.

Two kinds: byte-level BPE ("gpt2"), cut before its merges as `pre_tokenizers` says, and SentencePiece's BPE
("llama"), whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.files import gguf_files
from moebius.checkpoint.gguf.header import read_header
from moebius.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS

# Kinds of pieces, as tokenizer.ggml.token_type numbers them.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"
_ADVICE = "put the model's tokenizer.json next to the file"


@dataclass(frozen=True)
class GgufTokenizer:
    """Filled by `read_tokenizer`."""

    backend: Tokenizer
    chat_template: str  # Jinja; empty: the file has none.
    named_tokens: Mapping[str, str]  # `bos_token`, `eos_token`, ... as chat templates read them.


class Vocabulary:
    """The file's own lists."""

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file = file
        self._metadata = metadata
        self.tokens: list[str] = self.required("tokens")

    def get(self, name: str) -> Any:
        """Returns `tokenizer.ggml.<name>`; None where there is none."""
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def required(self, name: str) -> Any:
        """Returns the same. Raises CheckpointError where there is none."""
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"{self.file} has no tokenizer.ggml.{name}; {_ADVICE}")
        return value

    def numbered(self) -> dict[str, int]:
        """Returns the ids by token."""
        return {token: number for number, token in enumerate(self.tokens)}

    def of_type(self, kind: int) -> list[str]:
        """Returns the tokens of that type (`token_type`)."""
        types = self.get("token_type") or ()
        return [token for token, found in zip(self.tokens, types, strict=False) if found == kind]

    def special(self, name: str) -> str | None:
        """Returns the token that `<name>_token_id` names.

        Raises CheckpointError for an id that there is not.
        """
        number = self.get(f"{name}_token_id")
        if number is None:
            return None
        if not 0 <= number < len(self.tokens):
            raise CheckpointError(
                f"{self.file}: tokenizer.ggml.{name}_token_id is {number}; "
                f"there are {len(self.tokens)} tokens"
            )
        token: str = self.tokens[number]
        return token


def read_tokenizer(model_path: str | Path) -> GgufTokenizer:
    """Raises CheckpointError naming the file, and the kind of tokenizer if it is not a known one."""
    file = gguf_files(model_path)[0]
    metadata = read_header(file).metadata
    vocabulary = Vocabulary(file, metadata)
    kind = vocabulary.required("model")
    build = _KINDS.get(str(kind))
    if build is None:
        raise CheckpointError(
            f"{file}: tokenizer.ggml.model is {kind!r}; allowed: {', '.join(_KINDS)}; or {_ADVICE}"
        )
    try:
        backend = build(vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # the Rust library raises bare Exception
        raise CheckpointError(f"{file}: its tokenizer cannot be built ({error}); {_ADVICE}") from error
    add_special_tokens(backend, vocabulary)
    named = {
        f"{short}_token": vocabulary.special(name)
        for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return GgufTokenizer(
        backend,
        str(metadata.get("tokenizer.chat_template") or ""),
        {name: token for name, token in named.items() if token is not None},
    )


def byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Returns BPE over bytes. Raises CheckpointError naming the way of cutting text where it is not known."""
    pre = vocabulary.required("pre")
    cut = PRE_TOKENIZERS.get(str(pre))
    if cut is None:
        raise CheckpointError(
            f"{vocabulary.file}: tokenizer.ggml.pre is {pre!r}; allowed: {', '.join(PRE_TOKENIZERS)}; "
            f"or {_ADVICE}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.required("merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.numbered(), merges=merges))
    if cut.normalizer is not None:
        tokenizer.normalizer = cut.normalizer
    tokenizer.pre_tokenizer = cut.splitter
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    ids = vocabulary.numbered()
    unknown = vocabulary.of_type(UNKNOWN)
    model = models.BPE(
        vocab=ids,
        merges=_merges(ids, vocabulary.required("scores")),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = vocabulary.get("add_space_prefix") is not False
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(ids: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns the pairs of pieces that make a piece, those of the best one first, as SentencePiece joins
    them.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, number in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-scores[number], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


# By tokenizer.ggml.model.
_KINDS: Mapping[str, Callable[[Vocabulary], Tokenizer]] = {"gpt2": byte_level, "llama": _sentencepiece}


def add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens are never cut, nor are those that users defined; the first token may be implied."""
    control = vocabulary.of_type(CONTROL)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    defined = vocabulary.of_type(USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
    first = vocabulary.special("bos")
    # llama.cpp's default: SentencePiece models begin with it unless they say otherwise.
    implied = vocabulary.get("add_bos_token")
    implied = vocabulary.get("model") == "llama" if implied is None else implied
    if implied and first is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"],
            pair=[first, "$A", first, "$B"],
            special_tokens=[(first, tokenizer.token_to_id(first))],
        )
