"""Tokenizers, in both directions: text to tokens, with lower bounds by which too long texts are refused
untokenised, and a growing sequence of tokens to text, cut at stop strings.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers

from gateway.text.conversation import (
    ChatTemplate,
    ChatTemplateError,
    ControlTokens,
    MarkedText,
    is_control,
    own_template,
)
from moebius.checkpoint.byte_level import bytes_to_piece, piece_to_bytes
from moebius.checkpoint.errors import CheckpointError, refuse_pointer
from moebius.checkpoint.gguf.files import companion_directory, is_gguf
from moebius.checkpoint.gguf.tokenizer import read_tokenizer
from moebius.checkpoint.tokenizer import read_tokenizer_file
from moebius.errors import UserError

# How much shorter a normaliser can make a text, by UTF-8 bytes; others (those that drop accents, say) have
# no bound. A Hangul syllable has 3 bytes, its parts 9; a mathematical letter 4, the letter it stands for 1.
_SHRINKING = {"NFC": 4, "NFD": 2, "NFKC": 12, "NFKD": 4, "Prepend": 1, "ByteLevel": 1}
# Pre-tokenisers that drop nothing, and those that drop white space.
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "Split"}
_DROPPING_SPACE = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}


@dataclass(frozen=True)
class TextSize:
    """Lower bounds on a text's tokens; filled by `of` from a tokenizer's description."""

    # Longest text one token stands for, UTF-8 bytes; None: the tokenizer gives no bound.
    longest: int | None
    counts_space: bool  # whether white space becomes tokens
    # Bytes that the vocabulary lacks, as some do that were trained on clean text: they become no tokens.
    lacking: bytes = b""

    @classmethod
    def of(cls, backend: BackendTokenizer) -> TextSize:
        """Reads vocabulary, normaliser, pre-tokeniser and added tokens."""
        shrinking, normalizer = 1, _state(backend.normalizer)
        for stage in _stages(normalizer, "normalizers"):
            factor = _shrinking(stage)
            if factor is None:
                return cls(None, True)
            shrinking *= factor
        added = backend.get_added_tokens_decoder().values()
        counts_space = not any(token.lstrip or token.rstrip for token in added)
        splits = _stages(_state(backend.pre_tokenizer), "pretokenizers")
        for stage in splits:
            if stage["type"] in _DROPPING_SPACE:
                counts_space = False
            elif stage["type"] not in _KEEPING or stage.get("behavior") == "Removed":
                return cls(None, True)
        pieces = backend.get_vocab(with_added_tokens=False)
        in_bytes = any(stage["type"] == "ByteLevel" for stage in splits)
        lacking = _lacking(pieces, in_bytes, _falls_back(backend.model))
        if lacking is None or (lacking and not (counts_space and normalizer is None)):
            return cls(None, True)  # unknown text becomes one token, or none
        lengths = [len(piece) if in_bytes else len(piece.encode()) for piece in pieces]
        lengths += [len(token.content.encode()) for token in added]
        return cls(max(lengths) * shrinking, counts_space, lacking)

    def least_tokens(self, text: str) -> int:
        """Returns the least number of tokens that `text` can have."""
        if self.longest is None:
            return 0
        if self.lacking:
            encoded = text.encode()
            size = len(encoded) - sum(map(encoded.count, self.lacking))
        elif self.counts_space:
            size = len(text) if text.isascii() else len(text.encode())
        else:
            size = sum(len(word.encode()) for word in text.split())
        return -(-size // self.longest)


def _state(part: Any) -> dict[str, Any] | None:
    """Returns how tokenizer.json describes a part; to describe the whole takes a hundred times as long."""
    described: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return described


def _falls_back(model: Any) -> bool:
    """Returns whether bytes without a piece have tokens of their own, which Unigram says only in whole."""
    found = getattr(model, "byte_fallback", None)
    return bool((_state(model) or {}).get("byte_fallback") if found is None else found)


def _stages(described: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Returns the stages of a normaliser or pre-tokeniser, with sequences flattened."""
    if described is None:
        return []
    if described["type"] == "Sequence":
        return [stage for part in described[key] for stage in _stages(part, key)]
    return [described]


def _shrinking(stage: dict[str, Any]) -> int | None:
    """Returns how much shorter this normaliser can make a text, or None if no bound is known."""
    if stage["type"] == "Replace":
        pattern = stage["pattern"].get("String")
        if pattern and len(stage["content"].encode()) >= len(pattern.encode()):
            return 1
        return None
    return _SHRINKING.get(stage["type"])


def _lacking(pieces: Mapping[str, int], in_bytes: bool, byte_fallback: bool) -> bytes | None:
    """Returns the bytes without tokens; None: there may be whole texts without. `in_bytes`: pieces spell
    bytes as byte-level vocabularies do."""
    if in_bytes:
        return bytes(byte for byte in range(256) if bytes_to_piece(bytes((byte,))) not in pieces)
    has_all = byte_fallback and all(f"<0x{byte:02X}>" in pieces for byte in range(256))
    return b"" if has_all else None


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(UserError):
    """The tokenizer's files are missing, unreadable or another model's; the message names the file."""


class Tokenizer:
    """One model's vocabulary and chat template.

    Decoding is thread-safe; encoding is not, as marked text changes the backend meanwhile: only the processes
    that prepare prompts encode, one text at a time.
    """

    def __init__(
        self,
        backend: BackendTokenizer,
        chat_template: ChatTemplate | None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings`: as in tokenizer_config.json."""
        self._backend = backend
        self._settings = settings or {}
        backend.no_truncation()  # some files have it set for training
        backend.no_padding()
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._bytes: dict[int, bytes] = {}  # cache: answers repeat a few thousand tokens
        self._fits = 0  # rows of a model that it is known to fit
        controls = [token for token in added.values() if is_control(token.content, token.special)]
        # A mark is removed before added tokens are searched for in normalised text: there it splits words.
        self._seamless = not any(token.normalized for token in controls)
        self.controls = ControlTokens([token.content for token in controls], self._seamless)

    @classmethod
    def from_dir(cls, directory: Path, template_file: str = "") -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and the chat template of a checkpoint.

        A checkpoint without a template gets ours for its model_type, if there is one.

        Args:
            directory: holds `tokenizer.json`, or Kimi's `tiktoken.model`; or a GGUF model, whose metadata
                counts where there is neither.
            template_file: a Jinja file that replaces the checkpoint's template; empty: the checkpoint's.
        Raises:
            TokenizerError: a file is missing or malformed.
        """
        model, directory = directory, companion_directory(directory)
        path = directory / "tokenizer.json"
        if is_gguf(model) and not path.is_file():
            return cls._from_gguf(model, template_file)
        settings = _read_json(directory / "tokenizer_config.json")
        backend = _read_backend(path)
        source, file = _template_source(directory, settings, template_file)
        if not source:
            added = {token.content for token in backend.get_added_tokens_decoder().values()}
            source = own_template(str(_read_json(directory / "config.json").get("model_type")), added)
        return cls(backend, _compiled(source, _named_tokens(settings), file), settings)

    @classmethod
    def _from_gguf(cls, model: Path, template_file: str) -> Tokenizer:
        try:
            found = read_tokenizer(model)
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error
        source = _read_template(Path(template_file)) if template_file else found.chat_template
        named = dict(found.named_tokens)
        return cls(found.backend, _compiled(source, named, template_file or str(model)), named)

    def check_fits(self, vocab_size: int) -> None:
        """Raises TokenizerError naming a token beyond the model's `vocab_size` rows.

        Models may have more rows than there are tokens. A token that was added to the tokenizer alone
        (fine-tunes add one for padding) is refused when a request contains it, unless chats need it.
        """
        if 0 < self._fits <= vocab_size:
            return  # found out before this process was forked
        template = "" if self.chat_template is None else self.chat_template.source
        for text, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            is_idle = token_id in self._added_text and text not in template
            if token_id >= vocab_size and not is_idle:
                raise TokenizerError(
                    f"the tokenizer is another model's: its token {text!r} has the id {token_id}, but the "
                    f"model's vocab_size is {vocab_size}"
                )
        self._fits = vocab_size

    def encode(self, text: str | MarkedText, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`; `add_special_tokens` applies the checkpoint's post-processor.

        Marked spellings in a `MarkedText` become ordinary tokens, and the mark itself none.
        """
        if isinstance(text, str) or not text.mark:
            return self._encode(text if isinstance(text, str) else text.text, add_special_tokens)
        stage = "normalizer" if self._seamless else "pre_tokenizer"
        usual = getattr(self._backend, stage)
        setattr(self._backend, stage, self._without(text.mark, usual))
        try:
            return self._encode(text.text, add_special_tokens)
        finally:
            setattr(self._backend, stage, usual)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` would also keep each token's offsets in the text: half as much memory again, and time.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def _without(self, mark: str, usual: Any) -> Any:
        """Returns the backend's stage, preceded by one that removes the mark."""
        if self._seamless:
            first = normalizers.Replace(mark, "")
            return first if usual is None else normalizers.Sequence([first, usual])
        split = pre_tokenizers.Split(mark, "removed")
        return split if usual is None else pre_tokenizers.Sequence([split, usual])

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids, by text, of the tokens that are matched before the text is split."""
        return {text: token_id for token_id, text in self._added_text.items()}

    @cached_property
    def info(self) -> dict[str, Any]:
        """tokenizer_config.json as `/tokenizer_info` shows it: tokens as texts, the chat template in use."""
        template = None if self.chat_template is None else self.chat_template.source
        shown = {name: _as_text(value) for name, value in self._settings.items()}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **shown, "chat_template": template}

    @cached_property
    def text_size(self) -> TextSize:
        """Bounds on the text per token; slow to compute for a large vocabulary."""
        return TextSize.of(self._backend)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; ids outside the vocabulary become nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str:
        """Returns the vocabulary's spelling of one token; empty for ids outside the vocabulary."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that one token adds to a text, which may be part of a character."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes_of(token_id)
            if token_id < self.vocab_size:
                self._bytes[token_id] = known
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if self.is_byte_level:
            return piece_to_bytes(self.piece(token_id))
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        piece = self.piece(token_id)
        fallback = _BYTE_FALLBACK.fullmatch(piece)
        if fallback:
            return bytes([int(fallback.group(1), 16)])
        return piece.replace("\u2581", " ").encode()


def _read_backend(path: Path) -> BackendTokenizer:
    """Returns the tokenizer in `path`; without such a file, that of a vocabulary next to it."""
    try:
        return read_tokenizer_file(path)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in `path`, or an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        refuse_pointer(path)
        value = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return value


def _read_template(file: Path) -> str:
    try:
        refuse_pointer(file)
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"chat template {file} is not readable: {error.strerror}") from error
    except ValueError as error:
        raise TokenizerError(f"chat template {file} is not readable: {error}") from error


def _template_source(directory: Path, settings: dict[str, Any], template_file: str) -> tuple[str, str]:
    """Returns the chat template's text and file: the given one, or the checkpoint's own."""
    if template_file:
        return _read_template(Path(template_file)), template_file
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        return _read_template(own_file), str(own_file)
    inline, file = settings.get("chat_template") or "", str(directory / "tokenizer_config.json")
    if isinstance(inline, list):  # several named templates: [{"name": ..., "template": ...}]
        try:
            inline = {entry["name"]: entry["template"] for entry in inline}.get("default", "")
        except (KeyError, TypeError) as error:
            raise TokenizerError(
                f"{file}: chat_template is a list of other things than a name and a template each"
            ) from error
    return str(inline), file


def _compiled(source: str, named_tokens: dict[str, str], file: str) -> ChatTemplate | None:
    """Returns the compiled template; None where the checkpoint has none."""
    try:
        return ChatTemplate(source, named_tokens) if source else None
    except ChatTemplateError as error:
        raise TokenizerError(f"{file}: {error}") from error


def _as_text(value: Any) -> Any:
    """Returns a token that is described by an object, or a list of them, as text."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value["content"] if isinstance(value, dict) and isinstance(value.get("content"), str) else value


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Returns `bos_token`, `eos_token`, ... as strings, as chat templates read them."""
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


REPLACEMENT = "\ufffd"
# A character has at most 4 bytes; a longer run of undecodable tokens is invalid text, not an incomplete one.
_MAX_HELD_TOKENS = 16
_CONTEXT_TOKENS = 6


class Detokenizer(ABC):
    """Text of a growing token sequence. The pieces of all steps and `flush` concatenate to the full text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()

    def keep(self, token_ids: Collection[int]) -> None:
        """Shows these tokens, also where special tokens are skipped: a parser needs them."""
        self._skipped = self._skipped - frozenset(token_ids)

    def step(self, token_id: int) -> str:
        """Returns the text that is certain after `token_id`; empty while a character is incomplete."""
        return "" if token_id in self._skipped else self._step(token_id)

    @abstractmethod
    def _step(self, token_id: int) -> str:
        """Returns `step`'s text for a token that is not skipped."""

    @abstractmethod
    def flush(self) -> str:
        """Returns the rest at the end of the output, with U+FFFD for an incomplete character."""


class ByteLevelDetokenizer(Detokenizer):
    """Exact and linear: byte-level vocabularies map tokens to bytes, and bytes are decoded as they come."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def _step(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """Decodes a short window twice per token, for decoders with context (leading spaces, byte fallback).

    The window starts at the last released piece, so that both decodings treat its beginning alike and
    their difference is the new text.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, context_ids: Sequence[int] = ()
    ) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        ordinary = (token for token in reversed(context_ids) if token not in tokenizer.special_ids)
        self._window = list(islice(ordinary, _CONTEXT_TOKENS))[::-1]
        self._given = len(self._window)  # tokens of the window whose text was released

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        before = self._decode(self._window[: self._given])
        after = self._decode(self._window)
        held = len(self._window) - self._given
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and held < _MAX_HELD_TOKENS):
            return ""
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return after[len(before) :]

    def flush(self) -> str:
        before = self._decode(self._window[: self._given])
        after = self._decode(self._window)
        self._given = len(self._window)
        return after[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def make_detokenizer(
    tokenizer: Tokenizer, skip_special_tokens: bool, context_ids: Sequence[int] = ()
) -> Detokenizer:
    """Returns the detokeniser for this vocabulary; `context_ids` are the tokens before the output."""
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens, context_ids)


@dataclass(frozen=True)
class StopResult:
    """The text that may be shown now, and the stop string found, if any; filled by `StopStrings.feed`."""

    text: str
    matched: str | None = None


class StopStrings:
    """Holds back the longest end of the text that may still become a stop string.

    The match that completes first wins (the longer one on a tie), so the result does not depend on how
    the text is split into pieces. Knuth, Morris and Pratt's automaton: the cost per character does not
    depend on the stop strings' length.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        # Longest first: of those that complete at the same character, the first wins.
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._falls = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters at the end of the text that begin each stop
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str) -> StopResult:
        """Adds text; after a match nothing more may be fed."""
        if not self._stops:
            return StopResult(text)
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = self._advance(character)
            if found is not None:
                self._held = ""
                return StopResult(buffer[: position if self._include else position - len(found)], found)
        shown = len(buffer) - max(self._matched)
        self._held = buffer[shown:]
        return StopResult(buffer[:shown])

    def flush(self) -> str:
        """Returns the held text at the end of the output."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Takes one character; returns the stop string that it completes."""
        for index, (stop, falls) in enumerate(zip(self._stops, self._falls, strict=True)):
            length = self._matched[index]
            while length and stop[length] != character:
                length = falls[length]
            length += stop[length] == character
            if length == len(stop):
                return stop
            self._matched[index] = length
        return None


def _borders(stop: str) -> list[int]:
    """Returns for each prefix of `stop` the length of its longest proper prefix that is also its suffix."""
    borders, length = [0, 0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders
