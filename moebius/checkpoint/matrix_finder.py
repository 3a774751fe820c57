"""Finds the tensors that together hold one matrix, and tells from them how it is quantised."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import MatrixTemplate
from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.stored_arrays import StoredArray, locate_array
from moebius.checkpoint.stored_matrix import StoredMatrix
from moebius.checkpoint.weight_schemes import (
    FLOATS,
    IGNORED_SUFFIXES,
    PLAIN,
    StoredRole,
    WeightScheme,
)

BIAS = StoredRole("channel", "bias", FLOATS)
# A matrix that has its tensors to itself.
ALONE = MatrixTemplate("{expert}")
_SCALARS = ("tensor", "tensor_reciprocal")


@dataclass(frozen=True)
class MatrixFinder:
    """Filled by `ExpertCheckpoint.open` for experts, and by the loader for all else."""

    # By the names that matrices are asked for; the infos have the checkpoint's own.
    tensors: Mapping[str, TensorInfo]
    directory: Path  # For messages.
    # What quantised matrices may look like; those in plain floats need no entry.
    schemes: tuple[WeightScheme, ...]

    def find(
        self, name: str, shape: tuple[int, int], template: MatrixTemplate = ALONE, expert: int = 0
    ) -> StoredMatrix:
        """The matrix of the logical `shape` that a plain checkpoint would have under `name`.

        Raises CheckpointError naming a tensor that is missing, mis-shaped, or of a type that no scheme of the
        checkpoint allows.
        """
        scheme = self._scheme(name, template)
        arrays = tuple(
            self._array(name, stored, template, expert, shape, scheme.name)
            for stored in _roles(scheme, self._lies_transposed(scheme, name, template, shape))
        )
        bias = self.tensors.get(side_name(name, "bias"))
        located = locate_array(bias, BIAS, template, expert, shape, "a bias") if bias is not None else None
        return StoredMatrix(scheme, shape, arrays, located)

    def _array(
        self,
        name: str,
        stored: StoredRole,
        template: MatrixTemplate,
        expert: int,
        shape: tuple[int, int],
        scheme: str,
    ) -> StoredArray:
        info = self._side(name, stored.suffix)
        if info is None:
            side = side_name(name, stored.suffix)
            raise CheckpointError(f"tensor {side!r} is missing from {self.directory} ({scheme} needs it)")
        if stored.role in _SCALARS:
            return _scalar(info, stored, template, expert, scheme)
        return locate_array(info, stored, template, expert, shape, scheme)

    def _scheme(self, name: str, template: MatrixTemplate) -> WeightScheme:
        """Returns what the tensors next to one another tell; the first scheme whose codes and scale fit."""
        plain = self.tensors.get(name)
        if plain is not None and plain.dtype in FLOATS:
            return PLAIN
        fitting = self._applying(name)
        likely: WeightScheme | None = None
        for scheme in fitting:
            codes = self.tensors.get(side_name(name, scheme.codes.suffix))
            if codes is None or codes.dtype not in scheme.codes.dtypes:
                continue
            if not self._has_scale(scheme, name, codes, template):
                continue
            likely = likely or scheme
            # Codes of one type may have scales of several names.
            scales = [role for role in scheme.roles if role.role == "scales"]
            if all(self._side(name, role.suffix) is not None for role in scales):
                return scheme
        if likely is not None:
            return likely
        if plain is not None and not any(plain.dtype in scheme.codes.dtypes for scheme in fitting):
            known = ", ".join(sorted({scheme.name for scheme in fitting})) or "no quantisation"
            raise CheckpointError(
                f"tensor {plain.name!r} has dtype {plain.dtype}; allowed: {', '.join(FLOATS)}, or what "
                f"quantization_config in config.json says ({known})"
            )
        # The error of what is missing names it.
        return fitting[0] if fitting else PLAIN

    def declared(self, name: str) -> WeightScheme:
        """Returns what the configuration alone says of a matrix, whatever tensors there are."""
        return next(iter(self._applying(name)), PLAIN)

    @cached_property
    def _targets(self) -> SchemeTargets:
        return SchemeTargets.of(self.schemes)

    def _applying(self, name: str) -> list[WeightScheme]:
        """Returns schemes whose targets have the module, most specific first."""
        return self._targets.applying(self._module(name))

    def _module(self, name: str) -> str:
        """Returns the name as the checkpoint spells it, which is what targets are matched with."""
        for suffix in dict.fromkeys(scheme.codes.suffix for scheme in self.schemes):
            codes = self.tensors.get(side_name(name, suffix))
            if codes is not None:
                return codes.name.removesuffix(f".{suffix}")
        return name.removesuffix(".weight")

    def _side(self, name: str, suffix: str) -> TensorInfo | None:
        """Returns what lies next to `name`; next to experts in one tensor ModelOpt writes a suffix whole."""
        whole = None if name.endswith(".weight") else self.tensors.get(f"{name}_{suffix}")
        return whole or self.tensors.get(side_name(name, suffix))

    def _lies_transposed(
        self, scheme: WeightScheme, name: str, template: MatrixTemplate, shape: tuple[int, int]
    ) -> bool:
        """Returns plain ones as the layout says.

        NVFP4 by its shape: ModelOpt writes a Llama 4's experts `[E, in / 2, out]`, and what takes them apart
        `[out, in / 2]`. Packed words keep their own way.
        """
        if not template.transposed or scheme.layout != "nvfp4":
            return template.transposed and scheme.layout == "plain"
        codes = self.tensors.get(side_name(name, scheme.codes.suffix))
        return codes is None or codes.shape[-2:] != (shape[0] * template.parts, shape[1] // 2)

    def _has_scale(
        self, scheme: WeightScheme, name: str, codes: TensorInfo, template: MatrixTemplate
    ) -> bool:
        """Tells a scale per row from one per tensor, which share a name."""
        matrices = codes.shape[0] if template.stacked and codes.shape else 1
        for stored in scheme.roles:
            if stored.role in ("channel", "tensor"):
                info = self._side(name, stored.suffix)
                if info is None or (math.prod(info.shape) in (1, matrices)) != (stored.role == "tensor"):
                    return False
        return True


def side_name(name: str, suffix: str) -> str:
    """Returns the tensor next to `name` of that suffix: `x.weight` has `x.scales`, `x` has `x_scales`."""
    if name.endswith(".weight"):
        return f"{name.removesuffix('.weight')}.{suffix}"
    return name if suffix == "weight" else f"{name}_{suffix.removeprefix('weight_')}"


def is_ignored(name: str) -> bool:
    """Returns a side tensor that does not change what the weights are."""
    return any(name.endswith((f".{suffix}", f"_{suffix}")) for suffix in IGNORED_SUFFIXES)


def _roles(scheme: WeightScheme, transposed: bool) -> tuple[StoredRole, ...]:
    """Codes and scales are `[in, out]` where the matrix lies the other way round."""
    if not transposed:
        return scheme.roles
    return tuple(
        replace(role, transposed=True) if role.role in ("codes", "scales") else role for role in scheme.roles
    )


def _scalar(
    info: TensorInfo, stored: StoredRole, template: MatrixTemplate, expert: int, scheme: str
) -> StoredArray:
    """Returns one value for the whole matrix; stacked experts have one each."""
    count = math.prod(info.shape)
    if info.dtype not in stored.dtypes or (count != 1 and not (template.stacked and expert < count)):
        raise CheckpointError(
            f"tensor {info.name!r} is {info.dtype} {list(info.shape)}; {scheme} calls for a single "
            f"{' or '.join(stored.dtypes)}"
        )
    position = expert if count > 1 else 0
    return StoredArray(stored, replace(info, shape=(count,)), None, range(position, position + 1), 1)


_PATTERN = "re:"
# Every matrix here is one; compressed-tensors' targets may be names of classes.
_CLASS = "Linear"


@dataclass(frozen=True)
class SchemeTargets:
    """Look-up by module name; made by `of`. There may be a scheme for each of thousands of modules."""

    # By module name, or the end of one after a dot.
    names: Mapping[str, WeightScheme]
    patterns: tuple[tuple[re.Pattern[str], WeightScheme], ...]
    others: tuple[WeightScheme, ...]  # Of the class, then of all modules.

    @staticmethod
    def of(schemes: tuple[WeightScheme, ...]) -> SchemeTargets:
        """The earlier of two schemes wins where both are as specific."""
        names: dict[str, WeightScheme] = {}
        patterns: list[tuple[re.Pattern[str], WeightScheme]] = []
        for scheme in schemes:
            for target in scheme.targets:
                if target.startswith(_PATTERN):
                    patterns.append((re.compile(target.removeprefix(_PATTERN)), scheme))
                elif target != _CLASS:
                    names.setdefault(target, scheme)
        of_class = (scheme for scheme in schemes if _CLASS in scheme.targets)
        of_all = (scheme for scheme in schemes if not scheme.targets)
        return SchemeTargets(names, tuple(patterns), (*of_class, *of_all))

    def applying(self, module: str) -> list[WeightScheme]:
        """Returns the schemes that apply to a module, most specific first."""
        # By identity: hashing a scheme costs more than all else here.
        return list({id(scheme): scheme for scheme in self._applying(module)}.values())

    def _applying(self, module: str) -> Iterator[WeightScheme]:
        ending = module if self.names else ""
        while ending:
            if ending in self.names:
                yield self.names[ending]
            ending = ending.partition(".")[2]
        yield from (scheme for pattern, scheme in self.patterns if pattern.match(module))
        yield from self.others
