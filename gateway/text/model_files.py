"""Reads the model's files in a gateway process, and compares them with those of the engine and of others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.text.tokenizer import Tokenizer
from moebius.checkpoint.errors import CheckpointError
from moebius.errors import WrongIdentity
from moebius.models.identity import (
    REMEDY,
    IdentityRecord,
    Parts,
    changes,
    check_unchanged,
    identity_parts,
    text_parts,
)


class ModelFilesError(Exception):
    """Tokenizer or chat template cannot be read; the message names the file."""


# What `keep_tokenizer` read last: directory, template and digests of the files, and the tokenizer.
_kept: list[tuple[str, str, Parts, Tokenizer]] = []


def keep_tokenizer(directory: str, template: str) -> Tokenizer:
    """Reads a model's tokenizer for this process and its forks, in which `read_tokenizer` then finds it: what
    checks a model before its processes start has read it already.

    Raises what `Tokenizer.from_dir` does, and CheckpointError naming a file that cannot be read.
    """
    parts = text_parts(directory, template)
    tokenizer = Tokenizer.from_dir(Path(directory), template)
    _kept[:] = [(directory, template, parts, tokenizer)]
    return tokenizer


def forget_tokenizer() -> None:
    """Frees what `keep_tokenizer` has read, once there will be no forks."""
    _kept.clear()


def read_tokenizer(directory: str, template: str, parts: Parts) -> Tokenizer:
    """Returns the tokenizer of files that have these digests. Raises what `Tokenizer.from_dir` does."""
    for kept in _kept:
        if kept[:3] == (directory, template, parts):
            return kept[3]
    return Tokenizer.from_dir(Path(directory), template)


@dataclass(frozen=True)
class ReadFiles:
    """The files that were read; filled by `read_files`."""

    directory: str
    tokenizer: Tokenizer
    parts: Parts  # digests of what was read

    def check_engine(self, identity: str) -> None:
        """Raises WrongIdentity when the engine's reported identity shows other files."""
        found = changes(identity_parts(identity), self.parts)
        if found:
            raise WrongIdentity(
                f"{found} since the engine was started, or is another one than the engine's: {REMEDY}"
            )


def read_files(directory: str, template: str, record: str, expected: Parts) -> ReadFiles:
    """Reads the tokenizer and the chat template.

    Args:
        directory: of the model, or a GGUF file.
        template: a chat template's file; empty: the model's own template.
        record: of `model.identity_file`.
        expected: digests found by other processes of this port; files without one are not compared.
    Raises:
        ModelFilesError: naming the file or directory at fault.
        WrongIdentity: naming files that have changed since other processes have read them.
    """
    try:
        parts = text_parts(directory, template)
    except CheckpointError as error:
        raise ModelFilesError(str(error)) from error
    found = changes(expected, parts)
    if found:
        raise WrongIdentity(f"{found} since the gateway was started: {REMEDY}")
    IdentityRecord(record).check(parts)
    try:
        tokenizer = read_tokenizer(directory, template, parts)
    except Exception as error:
        # The libraries that read these files raise any kind of error, often without a file name.
        text, named = str(error) or type(error).__name__, (directory, template)
        is_named = any(path and path in text for path in named)
        raise ModelFilesError(text if is_named else f"{template or directory}: {text}") from error
    check_unchanged(parts, lambda: text_parts(directory, template))
    return ReadFiles(directory, tokenizer, parts)
