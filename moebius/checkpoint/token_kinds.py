"""Which tokens count as one where n-grams are hashed: those that are written alike but for case, accents,
forms of characters and blanks.

Source: `build_compressed_token_map` in `inference/engram.py` of DeepSeek-V4.1.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.tokenizer import read_backend

# Of no published text: keeps a single blank from being stripped.
_BLANK = "\ue000"
# What a token decodes to that is a part of a character only.
_UNFINISHED = "\ufffd"


@lru_cache(maxsize=4)
def read_token_kinds(model: Path, vocab_size: int, num_kinds: int) -> tuple[int, ...]:
    """Returns the kind of each token id, `[vocab_size]`, numbered in the order of their first tokens; ids
    that the tokenizer does not have are of the kind 0.

    Raises CheckpointError where the tokenizer is missing, or has not `num_kinds` kinds: all rows of the
    tables would be others.
    """
    tokenizer = read_backend(model)
    kinds = token_kinds(tokenizer)
    if len(set(kinds)) != num_kinds or len(kinds) > vocab_size:
        raise CheckpointError(
            f"{model}: the tokenizer has {len(kinds)} tokens of {len(set(kinds))} kinds, but config.json has "
            f"vocab_size {vocab_size} and engram_compressed_vocab_size {num_kinds}: it is another model's"
        )
    return (*kinds, *[0] * (vocab_size - len(kinds)))


def token_kinds(tokenizer: Tokenizer) -> list[int]:
    """Returns the kind of each token of a tokenizer."""
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _BLANK),
            normalizers.Strip(),
            normalizers.Replace(_BLANK, " "),
        ]
    )
    kinds: dict[str, int] = {}
    found = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = normalizer.normalize_str(text) or text
        if _UNFINISHED in text:
            key = tokenizer.id_to_token(token_id) or text
        found.append(kinds.setdefault(key, len(kinds)))
    return found
