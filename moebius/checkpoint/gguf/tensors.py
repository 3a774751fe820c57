"""A GGUF model's tensors under their canonical names, as the index of any other checkpoint has them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.derived import DerivedValues
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.block_parts import BLOCK_PARTS
from moebius.checkpoint.gguf.blocks import FLOAT_TYPES, INTEGER_TYPES, unusable
from moebius.checkpoint.gguf.model import GgufModel, StoredBlocks
from moebius.checkpoint.gguf.names import Change, GgufRule, canonical_name
from moebius.checkpoint.gguf.rearranged import is_part, merged, rearranged
from moebius.checkpoint.gguf.schemes import FACTORS, KEPT_SCHEMES
from moebius.checkpoint.gguf.values import Dequantised, PartOfBlocks, RowFactors, Scaled
from moebius.checkpoint.index import CheckpointIndex, TensorInfo
from moebius.checkpoint.matrix_finder import side_name

# Keys of `expert_layouts.EXPERT_TENSOR_LAYOUTS`: how GGUF files have experts.
STACKED_LAYOUTS = ("stacked_projections", "stacked_gate_up")
# Values that were quantised in blocks nothing packs are packed as this: nearly exact, at 2 bytes a weight.
PACKED_AS = "bfloat16"
_NUMBER = re.compile(r"<(.*?)>")
_ROUTED = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(?P<which>gate_up|gate|up|down)_proj\.weight")


def gguf_index(model_path: str | Path, model: GgufModel, rules: tuple[GgufRule, ...]) -> CheckpointIndex:
    """Returns every tensor by its canonical name, by the architecture's `rules` and the common ones.

    Raises CheckpointError naming tensors that the architecture does not have.
    """
    tensors: dict[str, TensorInfo] = {}
    parts: dict[str, dict[Change, TensorInfo]] = {}
    unknown: list[str] = []
    for stored in model.tensors.values():
        renamed = canonical_name(rules, stored.name)
        if renamed is None and _belongs_to_weight(model, stored.name):
            continue
        if renamed is None:
            unknown.append(stored.name)
        elif renamed.name is None:
            continue
        elif is_part(renamed.change):
            values = _scaled(model, rules, stored, in_floats(stored, stored.name))
            parts.setdefault(renamed.name, {})[renamed.change] = values
        else:
            found = _tensors(model, rules, stored, _with_numbers(model, renamed.name), renamed.change)
            _check_new(model, stored, tensors, found)
            tensors |= found
    if unknown:
        raise CheckpointError(
            f"{model.file}: tensors that {model.architecture} is not known to have: "
            f"{', '.join(sorted(unknown))}"
        )
    # Some files have the whole next to its parts.
    missing = {name: by_change for name, by_change in parts.items() if name not in tensors}
    tensors |= {name: merged(model, name, by_change) for name, by_change in missing.items()}
    return CheckpointIndex(Path(model_path), tensors, STACKED_LAYOUTS)


def _with_numbers(model: GgufModel, name: str) -> str:
    """A name with the metadata's numbers in it, see `GgufRule`. Raises CheckpointError for none."""

    def number(match: re.Match[str]) -> str:
        value = model.value(match[1])
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if type(value) is not int:
            named = f"{model.architecture}.{match[1]}"
            raise CheckpointError(f"{model.file}: {named} is {value!r}; allowed: one number, for {name}")
        return str(value)

    return _NUMBER.sub(number, name)


def _check_new(
    model: GgufModel, stored: StoredBlocks, known: Mapping[str, TensorInfo], found: Mapping[str, TensorInfo]
) -> None:
    for name in found.keys() & known.keys():
        raise CheckpointError(f"{model.file}: {stored.name!r} and another tensor are both {name}")


def _tensors(
    model: GgufModel, rules: tuple[GgufRule, ...], stored: StoredBlocks, name: str, change: Change
) -> dict[str, TensorInfo]:
    """Returns the tensor, or the several that a packed format takes it as."""
    if change == "table":
        return {name: _in_integers(stored, name)}
    if _is_packed(model, stored, name):
        factors = _factors(model, rules, stored)
        if factors is None or FACTORS in (role.role for role in KEPT_SCHEMES[stored.type.name].roles):
            return packed_tensors(stored, name, factors)
    return {name: rearranged(model, _scaled(model, rules, stored, in_floats(stored, name)), change)}


def _belongs_to_weight(model: GgufModel, name: str) -> bool:
    """Returns whether it is a weight's scale, or that of its activations, which are not quantised here."""
    stem, _, last = name.rpartition(".")
    return last in ("scale", "input_scale") and f"{stem}.weight" in model.tensors


def _scale(model: GgufModel, rules: tuple[GgufRule, ...], stored: StoredBlocks) -> StoredBlocks | None:
    """What the weight's values are multiplied by, unless it is a tensor of the architecture's own."""
    name = f"{stored.name.removesuffix('.weight')}.scale"
    is_own = name == stored.name or canonical_name(rules, name) is not None
    return None if is_own else model.tensors.get(name)


def _scaled(
    model: GgufModel, rules: tuple[GgufRule, ...], stored: StoredBlocks, info: TensorInfo
) -> TensorInfo:
    """Returns the tensor with the scale that files of NVFP4 have besides: one for each matrix.

    Raises CheckpointError naming a scale that is not of float32, or not as many.
    """
    factors = _factors(model, rules, stored)
    if factors is None:
        return info
    return replace(info, dtype="F32", derived=Scaled(info, factors), packed_as=PACKED_AS)


def _factors(
    model: GgufModel, rules: tuple[GgufRule, ...], stored: StoredBlocks
) -> NDArray[np.float32] | None:
    """Returns what each matrix of a weight is multiplied by. Raises CheckpointError as `_scaled`."""
    scale = _scale(model, rules, stored)
    if scale is None:
        return None
    matrices = stored.shape[0] if len(stored.shape) == 3 else 1
    if scale.type.name != "F32" or math.prod(scale.shape) != matrices:
        raise CheckpointError(
            f"{scale.file}: tensor {scale.name!r} is {scale.type.name} of shape {list(scale.shape)}; "
            f"allowed: F32 of shape [{matrices}]"
        )
    found: NDArray[np.float32] = np.fromfile(scale.file, "<f4", matrices, offset=scale.offset)
    return found


def _in_integers(stored: StoredBlocks, name: str) -> TensorInfo:
    """Returns the tensor as it lies. Raises CheckpointError unless it has whole numbers."""
    if not stored.type.is_integer:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name!r} is {stored.type.name}; "
            f"allowed: {', '.join(INTEGER_TYPES)}"
        )
    kind = INTEGER_TYPES[stored.type.name]
    return TensorInfo(name, stored.file, kind, stored.shape, stored.offset, stored.nbytes)


def in_floats(stored: StoredBlocks, name: str) -> TensorInfo:
    """Returns the tensor in floats: as they lie, or dequantised when they are read.

    Raises CheckpointError naming a tensor of whole numbers, or a quantised one of one axis or of four.
    """
    if stored.type.is_float:
        kind = FLOAT_TYPES[stored.type.name]
        return TensorInfo(name, stored.file, kind, stored.shape, stored.offset, stored.nbytes)
    if stored.type.is_integer:
        raise unusable(stored.type.name, stored.name)
    if len(stored.shape) not in (2, 3):
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name!r} of {len(stored.shape)} axes is {stored.type.name}; "
            f"allowed: {', '.join(FLOAT_TYPES)}"
        )
    return _derived(stored, name, "F32", stored.shape, Dequantised(stored.type, _raw(stored)), PACKED_AS)


def _derived(
    stored: StoredBlocks,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    values: DerivedValues,
    packed_as: str = "",
    nbytes: int | None = None,
) -> TensorInfo:
    size = stored.nbytes if nbytes is None else nbytes
    return TensorInfo(name, stored.file, dtype, shape, stored.offset, size, values, packed_as)


def _raw(stored: StoredBlocks) -> TensorInfo:
    """Returns the blocks as bytes, `[matrices, rows, bytes of a row]`."""
    *outer, cols = stored.shape
    matrices = outer[0] if len(outer) == 2 else 1
    width = cols // stored.type.weights * stored.type.nbytes
    return TensorInfo(
        stored.name, stored.file, "U8", (matrices, outer[-1], width), stored.offset, stored.nbytes
    )


def _is_packed(model: GgufModel, stored: StoredBlocks, name: str) -> bool:
    """Returns whether its codes are packed as they are."""
    return _ROUTED.fullmatch(name) is not None and stored.type.name in KEPT_SCHEMES


def packed_tensors(
    stored: StoredBlocks, name: str, factors: NDArray[np.float32] | None = None
) -> dict[str, TensorInfo]:
    """Returns the tensors of its scheme; `factors`: one for each matrix, 1 without any."""
    raw, (*outer, cols) = _raw(stored), stored.shape
    parts = BLOCK_PARTS[stored.type.name]
    found: dict[str, TensorInfo] = {}
    for role in KEPT_SCHEMES[stored.type.name].roles:
        side = side_name(name, role.suffix)
        if role.role == FACTORS:
            matrices = outer[0] if len(outer) == 2 else 1
            rows = RowFactors(np.ones(matrices, np.float32) if factors is None else factors)
            found[side] = _derived(stored, side, "F32", (*outer, 1), rows, nbytes=0)
            continue
        part = parts[role.role]
        shape = (*outer, cols // part.step)
        # They share their blocks: bytes are counted with the codes.
        nbytes = stored.nbytes if role.role == "codes" else 0
        values = PartOfBlocks(stored.type, raw, role.role, part)
        found[side] = _derived(stored, side, part.dtype, shape, values, nbytes=nbytes)
    return found
