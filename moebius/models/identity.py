"""What makes a model's answers, as digests by name: the same for the same contents, wherever the files lie.

Nothing of a path, an inode or a time goes into a digest: hosts have copies, snapshots are links, and a
`touch` changes nothing that is computed. Small files are read as a whole; of files of weights their headers
and sizes, blocks spread evenly over them, and a block of every tensor that is not an expert's
(docs/decisions/0009 says what finds changes that these leave out). Each process compares what it reads
itself, so that hosts need no files that they do not use: names that only one side has are not compared.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.files import companion_directory, gguf_files, is_gguf
from moebius.errors import StartupError, WrongIdentity
from moebius.models.settled_files import SettledFiles
from moebius.replace_file import replace_file

if TYPE_CHECKING:
    from moebius.checkpoint.index import CheckpointIndex, TensorInfo

CONFIG = "config.json"
# Read by processes that turn text into tokens and back.
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "chat_template.jinja", CONFIG)
# Handed to routers that read the tokenizer themselves.
ROUTER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model", "tokenization_kimi.py"),
    *("chat_template.jinja", "chat_template.json", CONFIG, "generation_config.json"),
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
MODEL_FILES = (*ROUTER_FILES, *PROCESSOR_FILES)
CHECKPOINT = "checkpoint"
"""The identity of all weights and of what describes them, without the names of their files."""
EXPERT_CHECKPOINT = "expert_checkpoint/"
"""Comes before names of that checkpoint's files."""
TEMPLATE_FILE = "--chat-template"
_GGUF_HEADER = "GGUF header"
# Headers of known models end within it; what follows in a small one are weights.
_LONGEST_GGUF_HEADER = 2**25
ABSENT = "absent"
"""The digest of a file that a process looked for in vain: one that appears changes answers, too."""

_PIECE = 2**20
# Bytes looked at of each sampled place, and how many places of all files together.
_BLOCK = 4096
_BLOCKS = 512
_LEAST_PER_FILE = 4
# Tensors that are no expert's and have a block of their own, at most.
_MOST_TENSORS = 4096
_settled = SettledFiles()
Parts = Mapping[str, str]
"""Digests, 32 hexadecimal digits or `ABSENT`, by name."""


def file_digest(path: Path, most: int | None = None) -> str:
    """Returns 32 hexadecimal digits of the file's first `most` bytes, None: of all; ABSENT where there is
    none.

    Raises CheckpointError naming a file that cannot be read.
    """
    digest, left = hashlib.blake2b(digest_size=16), sys.maxsize if most is None else most
    try:
        with path.open("rb", buffering=0) as stream:
            while left > 0 and (piece := stream.read(min(_PIECE, left))):
                digest.update(piece)
                left -= len(piece)
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def text_parts(model: str | Path, template_file: str = "") -> dict[str, str]:
    """Returns the digests of what turns text into tokens and back; `template_file` takes the place of the
    checkpoint's template.

    Raises CheckpointError naming a file that cannot be read.
    """
    names = [name for name in TEXT_FILES if not (template_file and name == "chat_template.jinja")]
    parts = _small_files(model, names)
    if template_file:
        parts[TEMPLATE_FILE] = file_digest(Path(template_file))
    return parts


def model_parts(model: str | Path) -> dict[str, str]:
    """Returns the digests of all files that describe the model; weights are `weight_parts`.

    Raises CheckpointError.
    """
    return _small_files(model, MODEL_FILES)


def _small_files(model: str | Path, names: Iterable[str]) -> dict[str, str]:
    directory = companion_directory(model)
    parts = {name: file_digest(directory / name) for name in names}
    if is_gguf(model):
        parts[_GGUF_HEADER] = file_digest(gguf_files(model)[0], _LONGEST_GGUF_HEADER)
    return parts


def weight_parts(index: CheckpointIndex) -> dict[str, str]:
    """Returns the digests of weights by name of file. Reads a few MiB: header, blocks spread evenly, one of
    each tensor of dense layers; nothing of a file that this process has read so and that has not changed.

    Raises CheckpointError naming a file that cannot be read.
    """
    files = _by_file(index)
    spread = max(_LEAST_PER_FILE, _BLOCKS // max(1, len(files)))
    per_file = max(_LEAST_PER_FILE, _MOST_TENSORS // max(1, len(files)))
    parts = {}
    for file, tensors in files.items():
        try:
            parts[file.name] = _weights_digest(file, tensors, per_file, spread)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return parts


def _by_file(index: CheckpointIndex) -> dict[Path, list[TensorInfo]]:
    """Returns the tensors of each file, files by name."""
    found: dict[Path, list[TensorInfo]] = {}
    for info in index.tensors.values():
        found.setdefault(info.file, []).append(info)
    return dict(sorted(found.items(), key=lambda item: item[0].name))


def _weights_digest(file: Path, tensors: list[TensorInfo], most_dense: int, spread: int) -> str:
    with file.open("rb", buffering=0) as stream:
        asked = most_dense, spread, len(tensors)
        return _settled.digest(
            *(str(file), stream.fileno(), asked),
            lambda: _sampled(stream.fileno(), tensors, most_dense, spread),
        )


def _sampled(descriptor: int, tensors: list[TensorInfo], most_dense: int, spread: int) -> str:
    tensors = sorted(tensors, key=lambda info: (info.offset, info.name))
    dense = [info for info in tensors if "expert" not in info.name][:most_dense]
    digest = hashlib.blake2b(digest_size=16)
    size = os.fstat(descriptor).st_size
    digest.update(f"{size}\n".encode())
    digest.update(os.pread(descriptor, tensors[0].offset, 0))
    places = [*_spread(size, spread), *(_middle(info) for info in dense)]
    for offset, count in places:  # so that a disk, or a server of files, sees them all at once
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)
    for offset, count in places:
        digest.update(os.pread(descriptor, count, offset))
    return digest.hexdigest()


def _middle(info: TensorInfo) -> tuple[int, int]:
    """Returns offset and length of the block in the middle of a tensor."""
    count = min(_BLOCK, info.nbytes)
    return info.offset + (info.nbytes - count) // 2, count


def _spread(size: int, count: int) -> list[tuple[int, int]]:
    """Returns evenly spread blocks, the first and the last bytes among them; a small file as a whole."""
    if size <= count * _BLOCK:
        return [(0, size)]
    return [((size - _BLOCK) * number // (count - 1), _BLOCK) for number in range(count)]


def checkpoint_parts(index: CheckpointIndex, prefix: str = "") -> dict[str, str]:
    """`weight_parts`, config.json, and `CHECKPOINT` of both; `prefix` goes before every name.

    Raises CheckpointError naming a file that cannot be read.
    """
    parts = {CONFIG: file_digest(index.directory / CONFIG), **weight_parts(index)}
    whole = hashlib.blake2b(" ".join(parts.values()).encode(), digest_size=16).hexdigest()
    return {f"{prefix}{name}": value for name, value in {**parts, CHECKPOINT: whole}.items()}


def expert_parts(index: CheckpointIndex, model: str | Path, expert_checkpoint: str = "") -> dict[str, str]:
    """Returns the digests of what an expert server reads; `index` is that of `expert_checkpoint`, or of the
    model.

    Raises CheckpointError naming a file that cannot be read.
    """
    if not expert_checkpoint:
        return checkpoint_parts(index)
    config = file_digest(companion_directory(model) / CONFIG)
    return {CONFIG: config, **checkpoint_parts(index, EXPERT_CHECKPOINT)}


def expert_fingerprint(parts: Parts) -> str:
    """Computes `CHECKPOINT` of what holds the routed experts."""
    return parts.get(EXPERT_CHECKPOINT + CHECKPOINT) or parts[CHECKPOINT]


def checkpoint_fingerprint(index: CheckpointIndex) -> str:
    """Computes `CHECKPOINT` of a checkpoint alone. Raises CheckpointError."""
    return checkpoint_parts(index)[CHECKPOINT]


def identity_text(parts: Parts) -> str:
    """Returns lines "name=value", as identities travel."""
    return "".join(f"{name}={value}\n" for name, value in parts.items())


def identity_parts(identity: str) -> dict[str, str]:
    """The parts of a text that `identity_text` has made."""
    pairs = (line.rpartition("=") for line in identity.splitlines())
    return {name: value for name, _, value in pairs if name}


def identity_part(identity: str, name: str) -> str:
    """Returns the value of one line; empty: there is none."""
    return identity_parts(identity).get(name, "")


def identity_digest(identity: str) -> str:
    """Returns 32 hexadecimal digits of a whole identity; empty for an empty one."""
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest() if identity else ""


def changes(expected: Parts, found: Parts) -> str:
    """Returns what of `found` is not as expected, by names of files, for people; empty: nothing."""
    return _listed(list(_changes(expected, found).values()))


def _changes(expected: Parts, found: Parts) -> dict[str, str]:
    """Returns the changes in words, by name."""
    words = {}
    for name, value in found.items():
        if name.endswith(CHECKPOINT) or expected.get(name, value) == value:
            continue
        absence = "is missing" if value == ABSENT else "is new"
        words[name] = f"{name} {absence if ABSENT in (value, expected[name]) else 'has changed'}"
    for name in (CHECKPOINT, EXPERT_CHECKPOINT + CHECKPOINT):
        if not words and name in found and expected.get(name, found[name]) != found[name]:
            words[name] = "the checkpoint has changed"
    return words


def _listed(words: list[str]) -> str:
    shown = words if len(words) <= _MOST_SHOWN else [*words[:_MOST_SHOWN], f"{len(words) - _MOST_SHOWN} more"]
    return ", ".join(shown)


_MOST_SHOWN = 5
REMEDY = "put the files back that were there, or restart all processes to serve what is there now"


def check_unchanged(before: Parts, read_again: Callable[[], Parts]) -> None:
    """To be called when files have been read: raises WrongIdentity when they were written meanwhile."""
    found = changes(before, read_again())
    if found:
        raise WrongIdentity(
            f"{found} while it was read: start again once nothing writes to the model's files"
        )


class IdentityRecord:
    """What the processes of one system have read, in a file that they share: the first one to read a file
    notes its digest, and all later ones compare, those among them that are started again.

    Without a path nothing is noted or compared.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    def check(self, parts: Parts) -> None:
        """Compares, and notes what has not been noted yet.

        Raises WrongIdentity naming the files that have changed, StartupError when the record cannot be used.
        """
        if self._path is None:
            return
        with self._changing(self._path) as (known, refused):
            found = _changes(known, parts)
            for name in parts:
                refused.pop(name, None)
            refused.update(found)
            if not found:
                known.update({**parts, **known})
        if found:
            raise WrongIdentity(f"{_listed(list(found.values()))} since the engine was started: {REMEDY}")

    def replace(self, parts: Parts) -> None:
        """Notes parts whatever was noted: an operator has asked for the files to be read again."""
        if self._path is not None:
            with self._changing(self._path) as (known, _):
                known.update(parts)

    def refusal(self) -> str:
        """Returns which files keep a process from being started again, for those that run; empty: none."""
        if self._path is None or not self._path.exists():
            return ""
        try:
            words = list(self._read(self._path)[1].values())
        except StartupError as error:
            return str(error)
        return f"{_listed(words)} since the engine was started: {REMEDY}" if words else ""

    @contextmanager
    def _changing(self, path: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
        """Yields digests, and what keeps processes from starting, while no other process changes them."""
        try:
            with path.with_name(f"{path.name}.lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known, refused = self._read(path) if path.exists() else ({}, {})
                before = (dict(known), dict(refused))
                yield known, refused
                if (known, refused) != before:
                    # A process that is killed leaves the old record or the new one.
                    replace_file(path, json.dumps({"digests": known, "refused": refused}, indent=1), 0o644)
        except OSError as error:
            raise StartupError(f"identity_file: {path} cannot be used: {error}") from error

    @staticmethod
    def _read(path: Path) -> tuple[dict[str, str], dict[str, str]]:
        """Raises StartupError for what is no record."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return dict(content["digests"]), dict(content["refused"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StartupError(f"identity_file: {path} is no record of digests: {error!r}") from error
