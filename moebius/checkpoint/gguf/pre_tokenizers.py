"""How text is cut before its merges: what GGUF calls `tokenizer.ggml.pre`, for byte-level vocabularies.

The patterns are those of the published tokenizers; every one is matched within what those before it left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_REST}"


# Of letters with their marks, every digit alone.
_MARKED_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cased_words(but: str, rest: str) -> str:
    """Returns the words that begin in capitals or not, each with its contraction; `but`: letters they do not
    have.
    """
    upper, lower, start = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]", r"[^\r\n\p{L}\p{N}]?"
    ends = f"{_CONTRACTIONS}?"
    return rf"{start}{upper}*{lower}+{ends}|{start}{upper}+{lower}*{ends}|\p{{N}}{{1,3}}|{rest}"


_THREE_DIGITS = (_words(r"\p{N}{1,3}"),)
_GPT_4O = (_cased_words("", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_KIMI_K2 = (r"[\p{Han}]+|" + _cased_words(r"&&[^\p{Han}]", _REST),)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One row of the table."""

    patterns: tuple[str, ...] = ()  # Patterns whose matches are pieces; empty: GPT-2's.
    composes: bool = False  # Whether text is composed (NFC) first.
    single_digits: bool = False  # Whether every digit is a piece.

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        """Returns what is done to the text before all."""
        return normalizers.NFC() if self.composes else None

    @property
    def splitter(self) -> pre_tokenizers.PreTokenizer:
        """Cuts text into pieces and spells their bytes."""
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        if self.single_digits:
            cuts.append(pre_tokenizers.Digits(individual_digits=True))
        return pre_tokenizers.Sequence([*cuts, spell])


# Line breaks stay together, apart from all else.
_LAGUNA = (r"[^\n]+|\n+", _words(r"\p{N}"))
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_SINGLE_DIGITS = PreTokenizer((_words(r"\p{N}"),))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), composes=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "bailingmoe": PreTokenizer(_BAILING),
    "bailingmoe2": PreTokenizer(_BAILING),
    "chatglm-bpe": PreTokenizer(_THREE_DIGITS),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
    "glm4": PreTokenizer(_THREE_DIGITS),
    "glm5": PreTokenizer(_THREE_DIGITS),
    "gpt-2": PreTokenizer(),
    "gpt-4o": PreTokenizer(_GPT_4O),
    "hunyuan": _SINGLE_DIGITS,
    "hunyuan-dense": PreTokenizer(_DEEPSEEK_V3),
    "hy_v4": PreTokenizer(_DEEPSEEK_V3),
    "joyai-llm": PreTokenizer(_DEEPSEEK_V3),
    "kimi-k2": PreTokenizer(_KIMI_K2),
    "laguna": PreTokenizer(_LAGUNA),
    "llama-bpe": PreTokenizer(_THREE_DIGITS),
    "minimax-m2": PreTokenizer(_GPT_4O),
    "olmo": PreTokenizer(composes=True),
    "qwen2": _QWEN2,
    "qwen35": PreTokenizer((_MARKED_WORDS,), composes=True),
    "refact": PreTokenizer(single_digits=True),
    "smollm": PreTokenizer(single_digits=True),
    "solar-open": _SINGLE_DIGITS,
}
