"""A model's tokenizer, from whichever file its checkpoint has it in."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from moebius.checkpoint.errors import CheckpointError, refuse_pointer
from moebius.checkpoint.gguf.files import companion_directory, is_gguf
from moebius.checkpoint.gguf.tokenizer import read_tokenizer
from moebius.checkpoint.tiktoken_vocabulary import has_vocabulary, read_vocabulary


def read_backend(model: Path) -> Tokenizer:
    """Returns the tokenizer of a checkpoint: `tokenizer.json`, or Kimi's `tiktoken.model`, or a GGUF model's
    own.

    Raises CheckpointError naming what is missing or malformed.
    """
    path = companion_directory(model) / "tokenizer.json"
    if is_gguf(model) and not path.is_file():
        return read_tokenizer(model).backend
    return read_tokenizer_file(path)


def has_tokenizer(model: Path) -> bool:
    """Returns whether a checkpoint has any of these files."""
    directory = companion_directory(model)
    return is_gguf(model) or (directory / "tokenizer.json").exists() or has_vocabulary(directory)


def read_tokenizer_file(path: Path) -> Tokenizer:
    """Returns the tokenizer in `path`; without such a file, the one that a vocabulary next to it describes.

    Raises CheckpointError.
    """
    refuse_pointer(path)
    if not path.is_file() and has_vocabulary(path.parent):
        return read_vocabulary(path.parent)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: the tokenizer is read from a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error
