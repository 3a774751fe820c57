"""Merges a LoRA adapter into the checkpoint that it was trained for: a new checkpoint of the same files.

Adapters are those that PEFT saves (https://huggingface.co/docs/peft/developer_guides/checkpoint). They add
`scale * B A` to matrices (Hu et al. 2021, arXiv:2106.09685). Types and shapes stay, so that files are copied
and changed values are written in the places of the old ones; files in which nothing changes are hard links
where the file system has them.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.config_file import read_json
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.files import is_gguf
from moebius.checkpoint.index import CheckpointIndex, TensorInfo, open_safetensors, read_header
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_values import as_float32, to_bfloat16
from moebius.checkpoint.weight_schemes import FLOATS
from moebius.errors import UserError
from moebius.models.read import read_config
from moebius.models.registry import family_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# A module, then which of the two matrices; those of embeddings have no ending. PEFT's name is "default".
_PART = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<which>[AB])(?:\.default)?(?:\.weight)?"
)
# What trainers save beside an adapter that differs from the base model's.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# Keys of adapter_config.json that ask for more than `scale * B A`, and the values that ask for nothing.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", None),
    **dict.fromkeys(
        (
            "use_dora",
            "use_qalora",
            "lora_bias",
            "fan_in_fan_out",
            "layer_replication",
            "target_parameters",
            "trainable_token_indices",
            "alora_invocation_tokens",
        ),
        (False, None, [], {}),
    ),
}
# Of float32, computed at once.
_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class LowRank:
    """What is added to one matrix; filled by `read_adapter`."""

    a: TensorInfo  # [rank, in]
    b: TensorInfo  # [out, rank]
    scale: float
    # The stored matrix is the transpose of the product, as embeddings are.
    is_transposed: bool


@dataclass(frozen=True)
class Adapter:
    """Filled by `read_adapter`; by names of the base checkpoint's tensors as the trainer knew them."""

    added: Mapping[str, LowRank]
    # Whole tensors that were trained.
    replaced: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Merged:
    """What was done; filled by `merge_adapter`."""

    added: int
    replaced: int
    written_bytes: int  # of new files; others are links
    takes_tokenizer: bool


def read_adapter(directory: Path) -> Adapter:
    """Returns an adapter from its headers. Raises UserError naming a key or a tensor, and what is allowed."""
    if not (directory / WEIGHTS).is_file():
        raise UserError(
            f"{directory}: no {WEIGHTS} in it; allowed: the directory of an adapter as PEFT saves it"
        )
    try:
        config = read_json(directory / CONFIG)
        tensors = list(read_header(directory / WEIGHTS))
    except CheckpointError as error:
        raise UserError(str(error)) from None
    for key, plain in _PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise UserError(f"{directory / CONFIG}: {key} is {config[key]!r}; allowed: {plain[0]!r}")
    parts: dict[str, dict[str, TensorInfo]] = {}
    embeddings: set[str] = set()
    replaced: dict[str, TensorInfo] = {}
    for info in tensors:
        name = info.name.removeprefix(_PREFIX)
        match = _PART.fullmatch(name)
        if match is None and (".lora_" in name or not name.endswith((".weight", ".bias"))):
            raise UserError(f"{info.file}: tensor {info.name!r} is of a kind that cannot be merged")
        if match is None:
            replaced[name.replace(".modules_to_save", "")] = info
            continue
        parts.setdefault(f"{match['module']}.weight", {})[match["which"]] = info
        if match["embedding"]:
            embeddings.add(f"{match['module']}.weight")
    added = {name: _low_rank(name, found, config, name in embeddings) for name, found in parts.items()}
    if not added and not replaced:
        raise UserError(f"{directory / WEIGHTS} has no tensors")
    return Adapter(added, replaced)


def _low_rank(name: str, parts: Mapping[str, TensorInfo], config: Any, is_embedding: bool) -> LowRank:
    if len(parts) != 2:
        raise UserError(
            f"{next(iter(parts.values())).file}: of {name} only lora_{next(iter(parts))} is there"
        )
    a, b = parts["A"], parts["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.shape[0] == 0:
        raise UserError(f"{a.file}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {name} do not fit")
    for info in (a, b):
        if info.dtype not in FLOATS:
            raise UserError(
                f"{info.file}: tensor {info.name!r} is {info.dtype}; allowed: {', '.join(FLOATS)}"
            )
    rank = a.shape[0]
    alpha = _of_module(config.get("alpha_pattern"), name, config.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise UserError(f"{a.file.with_name(CONFIG)}: lora_alpha is {alpha!r}; allowed: a number")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(a, b, scale, is_embedding)


def _of_module(pattern: object, name: str, default: object) -> object:
    """Returns what `alpha_pattern` has for a module: its keys are ends of names, or expressions for them."""
    module = name.removesuffix(".weight")
    for key, value in pattern.items() if isinstance(pattern, dict) else ():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def merge_adapter(model: Path, adapter: Path, target: Path) -> Merged:
    """Writes the checkpoint in `model`, with an adapter merged, to the new directory `target`.

    Raises UserError naming a tensor that the checkpoint lacks, or has quantised or in another shape. Nothing
    is left of a merge that fails.
    """
    if is_gguf(model):
        raise UserError(f"{model} is a GGUF model; allowed: the checkpoint that the adapter was trained for")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists; allowed: a new directory")
    found = read_adapter(adapter)
    try:
        index = open_safetensors(model)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    names = _Names(model, index)
    added = {names.place(name, part.a): part for name, part in found.added.items()}
    replaced = {names.place(name, info): info for name, info in found.replaced.items()}
    for place, part in added.items():
        _check_shape(place, (part.b.shape[0], part.a.shape[1]), part)
    for place, info in replaced.items():
        _check_shape(place, info.shape, None)
    changed = {place.file for place in (*added, *replaced)}
    taken = [adapter / name for name in _TOKENIZER if (adapter / name).is_file()]
    with _new_directory(target) as made:
        written = _copy_files(model, made, changed)
        for file in taken:
            shutil.copyfile(file, made / file.name)
        with SliceReader() as reader:
            for place, part in added.items():
                _add(reader, place, part, made / place.file.name)
            for place, info in replaced.items():
                values = as_float32(reader.read(info), info.dtype)
                _write(made / place.file.name, place, 0, values)
    return Merged(len(added), len(replaced), written, bool(taken))


class _Names:
    """The base checkpoint's tensors by names that trainers know: its own, or the family's canonical ones."""

    def __init__(self, model: Path, index: CheckpointIndex) -> None:
        config = read_config(model)
        self._index, self._layers = index, int(config.get("num_hidden_layers") or 0)
        self._rules = family_of(str(config.get("model_type"))).names
        self._canonical = {self._canonical_of(name): info for name, info in index.tensors.items()}
        self._canonical.pop("", None)

    def _canonical_of(self, name: str) -> str:
        """Returns the name here; empty for what is left out."""
        return self._rules.canonical_name(name, self._layers) or ""

    def place(self, name: str, info: TensorInfo) -> TensorInfo:
        """Returns where it lies. Raises UserError naming it where it is not there, or not in floats."""
        place = self._index.tensors.get(name) or self._canonical.get(self._canonical_of(name))
        if place is None:
            raise UserError(
                f"{info.file}: {name!r} is not in {self._index.directory}; allowed: adapters of single "
                "matrices that this checkpoint has in floats (not quantised, and no experts in one tensor)"
            )
        if place.dtype not in FLOATS:
            raise UserError(
                f"{place.file}: tensor {place.name!r} is {place.dtype}; allowed: {', '.join(FLOATS)}: merge "
                "into the checkpoint that is not quantised"
            )
        return place


def _check_shape(place: TensorInfo, shape: tuple[int, ...], part: LowRank | None) -> None:
    wanted = shape[::-1] if part is not None and part.is_transposed else shape
    if place.shape != wanted:
        raise UserError(
            f"{place.file}: tensor {place.name!r} is {list(place.shape)}, the adapter's {list(wanted)}: it "
            "was trained for another model"
        )


@contextlib.contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target` that becomes it at the end; nothing is left of it after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield made
        made.chmod(0o755)
        made.rename(target)
    except OSError as error:
        raise UserError(f"{target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _copy_files(model: Path, target: Path, changed: set[Path]) -> int:
    """Copies what changes and what is small, links the rest; returns the bytes of the copies.

    Raises UserError where they do not fit.
    """
    files = [path for path in sorted(model.iterdir()) if path.is_file()]
    needed = sum(path.stat().st_size for path in files if path in changed)
    free = shutil.disk_usage(target).free
    if needed > free:
        raise UserError(f"{target.parent}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    for path in files:
        if path.suffix == ".safetensors" and path not in changed:
            try:
                os.link(path.resolve(), target / path.name)
                continue
            except OSError:  # another file system, or one without hard links
                needed += path.stat().st_size
        shutil.copyfile(path, target / path.name)
    return needed


def _add(reader: SliceReader, place: TensorInfo, part: LowRank, file: Path) -> None:
    """Adds the product in float32, in blocks of rows, and rounds once."""
    a, b = (as_float32(reader.read(info), info.dtype) for info in (part.a, part.b))
    left, right = (a.T, b.T) if part.is_transposed else (b, a)
    rows, columns = place.shape
    step = max(1, _BLOCK_BYTES // (4 * columns))
    for first in range(0, rows, step):
        some = slice(first, min(rows, first + step))
        values = as_float32(reader.read_slice(place, some), place.dtype)
        with np.errstate(over="ignore"):
            values += np.float32(part.scale) * (left[some] @ right)
        _write(file, place, first, values)


def _write(file: Path, place: TensorInfo, first_row: int, values: NDArray[np.float32]) -> None:
    """Writes rows of a tensor over those that are there. Raises UserError where one is not finite."""
    with np.errstate(over="ignore"):  # it is an error below
        stored = to_bfloat16(values) if place.dtype == "BF16" else values.astype(place.numpy_dtype)
    finite = np.isfinite(as_float32(stored, place.dtype)).all()
    if not finite:
        raise UserError(f"tensor {place.name!r} with the adapter is not finite in {place.dtype}")
    offset = place.offset + first_row * math.prod(place.shape[1:]) * place.numpy_dtype.itemsize
    with file.open("r+b") as output:
        output.seek(offset)
        output.write(np.ascontiguousarray(stored).tobytes())
