"""A checkpoint opened by its family: its tensors, its layers, and which layout its routed experts have."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import EXPERT_TENSOR_LAYOUTS, LAYER_PREFIXES, LocatedLayout
from moebius.checkpoint.gguf.files import is_gguf
from moebius.checkpoint.index import CheckpointIndex, TensorInfo, open_safetensors
from moebius.models.registry import family_of, gguf_family


def open_index(directory: str | Path) -> CheckpointIndex:
    """All tensors of a directory or GGUF model, those of GGUF under canonical names, from headers alone.

    Raises CheckpointError naming the file or tensor that is missing, malformed, twice there or unknown.
    """
    if not is_gguf(directory):
        return open_safetensors(directory)
    # Here, because few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.model import open_gguf
    from moebius.checkpoint.gguf.tensors import gguf_index

    model = open_gguf(directory)
    return gguf_index(directory, model, gguf_family(model)[1].rules)


# What layers of multi-token prediction have besides those of a decoder layer.
_MTP = re.compile(r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm|shared_head|embed_tokens|transformer)\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Panels for one processor and number of NUMA nodes, or blocks of GGUF copied into safetensors.
_CONVERTED = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)_exps\.")


def check_mtp_layers(index: CheckpointIndex, model_type: str, num_layers: int) -> None:
    """Layers after the last are left out only where they are multi-token prediction.

    Raises CheckpointError naming a tensor of another: config.json has fewer layers than the checkpoint.
    """
    # A GGUF file itself says how many of its blocks predict, and names what they have besides otherwise.
    names = family_of(model_type).names
    if not names.mtp_layers or index.layouts:
        return
    first_of: dict[int, str] = {}
    is_mtp: set[int] = set()
    for name in index.tensors:
        canonical = names.canonical_name(name, sys.maxsize) or ""
        layer = _LAYER.match(canonical)
        if layer is not None and int(layer[1]) >= num_layers:
            first_of.setdefault(int(layer[1]), name)
            if _MTP.match(canonical):
                is_mtp.add(int(layer[1]))
    for number, name in sorted(first_of.items()):
        if number not in is_mtp:
            raise CheckpointError(
                f"{index.directory}: tensor {name!r} is of layer {number}, but config.json has "
                f"num_hidden_layers {num_layers}, and nothing says that the layer is one of multi-token "
                "prediction: it would be left unused"
            )


def find_layout(index: CheckpointIndex, model_type: str) -> LocatedLayout:
    """Returns the family's layout that the checkpoint uses. Raises CheckpointError naming what was looked
    for.

    Of layouts that have the same names, the one whose shapes fit; where none fits, the first.
    """
    layouts = index.layouts or family_of(model_type).names.layouts
    first: LocatedLayout | None = None
    for found, up in _named_layouts(index, layouts):
        if _is_shaped(found, up):
            return found
        first = first or found
    if first is not None:
        return first
    converted = next(filter(_CONVERTED.match, index.tensors), None)
    if converted is not None:
        raise CheckpointError(
            f"{index.directory}: tensor {converted!r} is in a form that KTransformers' converters write; "
            "allowed: the published checkpoint or GGUF model that it was made from"
        )
    examples = ", ".join(EXPERT_TENSOR_LAYOUTS[name].example for name in layouts)
    raise CheckpointError(
        f"{index.directory} has no routed experts of {model_type}; expected names like {examples}"
    )


def _named_layouts(
    index: CheckpointIndex, layouts: tuple[str, ...]
) -> Iterator[tuple[LocatedLayout, TensorInfo]]:
    """Yields those of which there is an up matrix, with the tensor of one."""
    for layout in (EXPERT_TENSOR_LAYOUTS[name] for name in layouts):
        below = _up_pattern(layout.up.name)
        for prefix in LAYER_PREFIXES:
            pattern = re.compile(re.escape(prefix) + r"\d+\." + below)
            up = next((info for name, info in index.tensors.items() if pattern.fullmatch(name)), None)
            if up is not None:
                yield LocatedLayout(index, layout, prefix), up


def _is_shaped(found: LocatedLayout, up: TensorInfo) -> bool:
    """Returns whether fused gate and up with down have the sizes that the layout calls for.

    Shapes of one tensor alone may fit both ways round, those of the two never do: gate and up have twice as
    many outputs as down has inputs, and as many inputs as it has outputs.
    """
    layout = found.layout
    if layout.up.parts == 1:
        return True
    down = found.index.tensors.get(up.name.replace("gate_up_proj", "down_proj"))
    if down is None or len(up.shape) != 3 or len(down.shape) != 3:
        return False
    (outputs, hidden), (rows, inner) = (
        shape[::-1] if layout.up.transposed else shape for shape in (up.shape[1:], down.shape[1:])
    )
    return outputs == layout.up.parts * inner and hidden == rows


def _up_pattern(name: str) -> str:
    """Returns the tensor that holds up, or its codes where it is quantised."""
    stem = re.escape(name.removesuffix(".weight")).replace(r"\{expert\}", r"\d+")
    if name.endswith(".weight"):
        return stem + r"\.(?:weight|weight_packed|qweight|\w+_codes)"
    return stem + r"(?:_blocks|_packed)?"
