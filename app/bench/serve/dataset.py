"""Prompts and output lengths of a load: of fixed length, or as in ShareGPT's conversations.

No tokenizer is needed. Two short requests tell how many tokens the server counts for a word of the list
below; how many it really counted for each prompt is in the usage that it reports.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moebius.errors import UserError

# Common words that most vocabularies have as one token.
_WORDS = re.findall(
    r"\w+",
    """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point
    home water room mother area money story fact month lot right study book eye job word business issue
    side kind head house service friend father power hour game line end member law car city community
    name president team minute idea body information back parent face others level office door health
    person art war history party result change morning reason research girl guy moment air teacher force
    education
    """,
)
_CHARACTERS_PER_WORD = 1 + sum(map(len, _WORDS)) / len(_WORDS)
# Median and spread (of the logarithm) of the lengths in tokens: with the limits below, prompts and outputs
# of about 200 tokens on average each, as in the conversations that are commonly drawn from ShareGPT.
_PROMPT_LENGTHS = (85.0, 1.5)
_OUTPUT_LENGTHS = (130.0, 1.0)
# Conversations that are taken: neither trivial nor longer than servers of the time could hold.
_SHORTEST, _LONGEST_PROMPT, _LONGEST_BOTH = 4, 1024, 2048


@dataclass(frozen=True)
class PromptRequest:
    """One request of a load; filled by `Dataset.draw`."""

    prompt: str
    output_len: int  # Tokens asked for.


@dataclass(frozen=True)
class TokenScale:
    """How the server counts tokens of our words; filled by `client.measure_scale`."""

    per_word: float
    # Of an empty prompt: the chat template's.
    overhead: float

    @property
    def per_character(self) -> float:
        """Tokens per character of English text."""
        return self.per_word / _CHARACTERS_PER_WORD

    def words_for(self, tokens: float) -> int:
        """Returns how many words make a prompt of about `tokens` tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.per_word))


@dataclass(frozen=True)
class LengthOptions:
    """Which prompts; filled by the command line, named as vLLM's and SGLang's benchmarks name them."""

    dataset_name: str = "sharegpt"  # or "random"
    dataset_path: Path | None = (
        None  # A file in ShareGPT's format; None: lengths of the built-in distribution
    )
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0  # Lengths are within (1 - ratio) and (1 + ratio) of those above.
    sharegpt_output_len: int | None = None  # None: as long as the conversation's answer

    def check(self) -> None:
        """Raises UserError naming the option."""
        if self.dataset_name not in ("sharegpt", "random"):
            raise UserError(
                f"--dataset-name: {self.dataset_name!r} is not allowed; allowed: sharegpt, random"
            )
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise UserError("--dataset-path is read with --dataset-name sharegpt only")


class Dataset:
    """Draws requests; equal seeds draw equal ones."""

    def __init__(self, options: LengthOptions, scale: TokenScale, seed: int) -> None:
        """Raises UserError for a file that is not in ShareGPT's format."""
        self._options, self._scale, self._seed = options, scale, seed
        path = options.dataset_path
        self._conversations = None if path is None else _conversations(path, scale)

    def draw(self, count: int, part: int) -> list[PromptRequest]:
        """`count` requests of one part of a run; no two parts share a beginning of prompts drawn here."""
        rng = np.random.default_rng([self._seed, part])
        if self._conversations is not None:
            return self._from_file(rng, count)
        if self._options.dataset_name == "random":
            prompts = self._uniform(rng, self._options.random_input_len, count)
            outputs = self._uniform(rng, self._options.random_output_len, count)
        else:
            prompts, outputs = sharegpt_lengths(rng, count)
            if self._options.sharegpt_output_len is not None:
                outputs = np.full(count, self._options.sharegpt_output_len)
        pairs = zip(prompts.tolist(), outputs.tolist(), strict=True)
        return [PromptRequest(words(rng, self._scale.words_for(length)), output) for length, output in pairs]

    def _uniform(self, rng: np.random.Generator, length: int, count: int) -> Any:
        ratio = self._options.random_range_ratio
        lowest, highest = max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio)))
        return rng.integers(lowest, highest + 1, count)

    def _from_file(self, rng: np.random.Generator, count: int) -> list[PromptRequest]:
        assert self._conversations is not None
        found = self._conversations
        # Each once before one comes again.
        rounds = -(-count // len(found))
        order = np.concatenate([rng.permutation(len(found)) for _ in range(rounds)])[:count]
        chosen = [found[index] for index in order.tolist()]
        length = self._options.sharegpt_output_len
        return [PromptRequest(one.prompt, length or one.output_len) for one in chosen]


def words(rng: np.random.Generator, count: int) -> str:
    """Returns a number of words in a random order."""
    return " ".join(_WORDS[index] for index in rng.integers(0, len(_WORDS), count).tolist())


def sharegpt_lengths(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Returns prompt and output lengths in tokens, distributed about as ShareGPT's: int arrays (count,)."""
    lengths = []
    for median, spread in (_PROMPT_LENGTHS, _OUTPUT_LENGTHS):
        drawn = rng.lognormal(np.log(median), spread, count)
        lengths.append(np.clip(np.rint(drawn), _SHORTEST, _LONGEST_PROMPT).astype(np.int64))
    return lengths[0], lengths[1]


def _conversations(path: Path, scale: TokenScale) -> list[PromptRequest]:
    """Returns first questions and lengths of their answers, of those that are neither trivial nor
    very long.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--dataset-path {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--dataset-path {path} is not JSON: {error}") from None
    found = []
    for entry in document if isinstance(document, list) else []:
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        values = [turn.get("value") for turn in (turns or [])[:2] if isinstance(turn, dict)]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < 2:
            continue
        prompt_len, output_len = (round(len(text) * scale.per_character) for text in texts)
        if prompt_len < _SHORTEST or output_len < _SHORTEST:
            continue
        if prompt_len <= _LONGEST_PROMPT and prompt_len + output_len <= _LONGEST_BOTH:
            found.append(PromptRequest(texts[0], output_len))
    if not found:
        raise UserError(
            f"--dataset-path {path} has no usable conversation; expected is ShareGPT's format: "
            '[{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}]'
        )
    return found
