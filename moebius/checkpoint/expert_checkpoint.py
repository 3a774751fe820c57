"""All routed experts of a checkpoint: where each matrix lies and how it is quantised."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import MATRICES, LocatedLayout, MatrixTemplate
from moebius.checkpoint.expert_matrices import ExpertMatrix
from moebius.checkpoint.index import CheckpointIndex, TensorInfo
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.rules import find_layout
from moebius.checkpoint.stored_arrays import StoredArray, locate_array
from moebius.checkpoint.weight_schemes import (
    FLOATS,
    IGNORED_SUFFIXES,
    PLAIN,
    PLAIN_CODES,
    StoredRole,
    WeightScheme,
)

BIAS = StoredRole("channel", "bias", FLOATS)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One expert: gate and up `[I, H]`, down `[H, I]`."""

    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix

    @property
    def has_bias(self) -> bool:
        """Whether any of the three has one."""
        return any(matrix.bias is not None for matrix in (self.gate, self.up, self.down))


@dataclass(frozen=True)
class ExpertCheckpoint:
    """Filled by `open`."""

    model: MoeGeometry
    layout: LocatedLayout
    # What quantised matrices may look like; those in plain floats need no entry.
    schemes: tuple[WeightScheme, ...]

    @staticmethod
    def open(model_path: str, model: MoeGeometry) -> ExpertCheckpoint:
        """Reads headers and configuration only. Raises CheckpointError."""
        layout = find_layout(CheckpointIndex.open(model_path), model.model_type)
        return ExpertCheckpoint(model, layout, read_schemes(model_path))

    def expert(self, layer: int, expert: int) -> ExpertMatrices:
        """The three matrices. Raises CheckpointError as `matrix` does, or when gate and up differ."""
        found = ExpertMatrices(*(self.matrix(layer, expert, matrix) for matrix in MATRICES))
        if found.gate.packed_format != found.up.packed_format:
            raise CheckpointError(
                f"{found.gate.name!r} is {found.gate.packed_format}, {found.up.name!r} "
                f"{found.up.packed_format}; both have to be the same"
            )
        return found

    def matrix(self, layer: int, expert: int, which: str) -> ExpertMatrix:
        """ "gate", "up" or "down".

        Raises CheckpointError naming a tensor that is missing, mis-shaped, or of a type that no scheme of the
        checkpoint allows.
        """
        template = self.layout.layout.template(which)
        name = self.layout.name(layer, expert, which)
        size = (self.model.moe_intermediate_size, self.model.hidden_size)
        shape = size[::-1] if which == "down" else size
        scheme = self._scheme(name)
        arrays = tuple(
            self._array(name, stored, template, expert, shape, scheme.name)
            for stored in self._roles(scheme, template)
        )
        bias_name = side_name(name, "bias")
        bias = None
        if bias_name in self.layout.index:
            info = self.layout.index[bias_name]
            bias = locate_array(info, BIAS, template, expert, shape, "a bias")
        return ExpertMatrix(scheme, shape, arrays, bias)

    def _roles(self, scheme: WeightScheme, template: MatrixTemplate) -> tuple[StoredRole, ...]:
        if scheme is not PLAIN or not template.transposed:
            return scheme.roles
        return (StoredRole("codes", "weight", PLAIN_CODES.dtypes, transposed=True),)

    def _array(
        self,
        name: str,
        stored: StoredRole,
        template: MatrixTemplate,
        expert: int,
        shape: tuple[int, int],
        scheme: str,
    ) -> StoredArray:
        side = side_name(name, stored.suffix)
        info = self.layout.index.tensors.get(side)
        if info is None:
            raise CheckpointError(
                f"tensor {side!r} is missing from {self.layout.index.directory} ({scheme} needs it)"
            )
        if stored.role in ("tensor", "tensor_reciprocal"):
            return _scalar(info, stored, scheme)
        return locate_array(info, stored, template, expert, shape, scheme)

    def _scheme(self, name: str) -> WeightScheme:
        """What the tensors beside one another tell; the first scheme whose codes and scale fit."""
        index = self.layout.index.tensors
        plain = index.get(name)
        if plain is not None and plain.dtype in FLOATS:
            return PLAIN
        fitting = [scheme for scheme in self.schemes if _applies(scheme, name)]
        for scheme in fitting:
            codes = index.get(side_name(name, scheme.codes.suffix))
            if codes is not None and codes.dtype in scheme.codes.dtypes and self._has_scale(scheme, name):
                return scheme
        if plain is not None and not any(scheme.codes.dtypes == (plain.dtype,) for scheme in fitting):
            known = ", ".join(sorted({scheme.name for scheme in fitting})) or "no quantisation"
            raise CheckpointError(
                f"tensor {name!r} has dtype {plain.dtype}; allowed for experts: {', '.join(FLOATS)}, or what "
                f"quantization_config in config.json says ({known})"
            )
        # The error of what is missing names it.
        return fitting[0] if fitting else PLAIN

    def _has_scale(self, scheme: WeightScheme, name: str) -> bool:
        """Tells a scale per row from one per tensor, which share a name."""
        for stored in scheme.roles:
            if stored.role in ("channel", "tensor"):
                info = self.layout.index.tensors.get(side_name(name, stored.suffix))
                if info is None or (_count(info) == 1) != (stored.role == "tensor"):
                    return False
        return True


def side_name(name: str, suffix: str) -> str:
    """The tensor beside `name` of that suffix: `x.weight` has `x.scales`, `x` has `x_scales`."""
    if name.endswith(".weight"):
        return f"{name.removesuffix('.weight')}.{suffix}"
    return name if suffix == "weight" else f"{name}_{suffix.removeprefix('weight_')}"


def is_ignored(name: str) -> bool:
    """A side tensor that does not change what the weights are."""
    return any(name.endswith((f".{suffix}", f"_{suffix}")) for suffix in IGNORED_SUFFIXES)


def _count(info: TensorInfo) -> int:
    count = 1
    for size in info.shape:
        count *= size
    return count


def _scalar(info: TensorInfo, stored: StoredRole, scheme: str) -> StoredArray:
    if info.dtype not in stored.dtypes or _count(info) != 1:
        raise CheckpointError(
            f"tensor {info.name!r} is {info.dtype} {list(info.shape)}; {scheme} calls for a single "
            f"{' or '.join(stored.dtypes)}"
        )
    return StoredArray(stored, info, None, range(1), 1)


def _applies(scheme: WeightScheme, name: str) -> bool:
    """compressed-tensors targets: class names (experts are Linear), module names, or re:patterns."""
    module = name.removesuffix(".weight")
    for target in scheme.targets:
        if target.startswith("re:"):
            if re.match(target.removeprefix("re:"), module):
                return True
        elif target == "Linear" or module == target or module.endswith(f".{target}"):
            return True
    return not scheme.targets
