"""Which tensors of a checkpoint every parameter is read from, and proof that none is missing or left over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpu_service.loader.names import Target
from gpu_service.loader.sources import PlainSource, QuantisedSource, WeightSource
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.matrix_finder import MatrixFinder, is_ignored, side_name
from moebius.checkpoint.reader import read_slice
from moebius.checkpoint.weight_schemes import FLOATS, WeightScheme

# How many names an error lists before it only counts the rest.
_MAX_LISTED = 20


def find_sources(
    directory: Path,
    present: Mapping[str, TensorInfo],
    expected: Mapping[str, Target],
    schemes: tuple[WeightScheme, ...],
) -> dict[str, WeightSource]:
    """A source for every expected name; `present` has the checkpoint's tensors by canonical name.

    What is stored decides: floats under the expected name are taken as they are, anything else must fit one
    of `schemes`. Raises CheckpointError listing every name that is missing, unused, mis-shaped, of a wrong
    type, or quantised in a way that can not be read.
    """
    search = _Search(MatrixFinder(present, directory, schemes), expected)
    for name, target in expected.items():
        search.locate(name, target)
    search.check_unused()
    lines = [f"{len(names)} {kind}: {listed(names)}" for kind, names in search.problems.items() if names]
    if lines:
        raise CheckpointError(f"{directory} does not fit its config.json: {'; '.join(lines)}")
    return search.sources


def listed(items: Iterable[str]) -> str:
    """For messages: the first names in order, and how many more there are."""
    names = sorted(items)
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _no_problems() -> dict[str, list[str]]:
    return {kind: [] for kind in ("missing", "unused", "mis-shaped", "mis-typed", "unreadable")}


@dataclass
class _Search:
    finder: MatrixFinder
    expected: Mapping[str, Target]
    # Filled by `locate`.
    sources: dict[str, WeightSource] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=_no_problems)
    # The checkpoint's own names of tensors that a source reads.
    used: set[str] = field(default_factory=set)

    def locate(self, name: str, target: Target) -> None:
        """Find the source of one expected name, or note what is wrong with it."""
        info = self.finder.tensors.get(name)
        if info is not None and info.dtype in FLOATS:
            self._take_plain(name, info, target)
        elif len(target.shape) == 2 and self._is_quantised(name):
            self._take_quantised(name, target)
        elif info is None:
            self.problems["missing"].append(name)
        else:
            self.used.add(info.name)
            self.problems["mis-typed"].append(f"{info.name} {info.dtype} (allowed {', '.join(FLOATS)})")

    def _take_plain(self, name: str, info: TensorInfo, target: Target) -> None:
        self.used.add(info.name)
        if info.shape != target.shape:
            self.problems["mis-shaped"].append(
                f"{info.name} {list(info.shape)} (expected {list(target.shape)})"
            )
        self.sources[name] = PlainSource(info)

    def _is_quantised(self, name: str) -> bool:
        return name in self.finder.tensors or any(self._side_tensors(name))

    def _take_quantised(self, name: str, target: Target) -> None:
        rows, cols = target.shape
        try:
            # A bias is a parameter of its own.
            matrix = replace(self.finder.find(name, (rows, cols)), bias=None)
        except CheckpointError as error:
            self.problems["unreadable"].append(str(error))
            self.used.update(info.name for info in self._side_tensors(name))
            return
        self.used.update(matrix.tensor_names)
        self.sources[name] = QuantisedSource(matrix)

    def _side_tensors(self, name: str) -> Iterator[TensorInfo]:
        """Tensors that some scheme would read for the matrix."""
        for scheme in self.finder.schemes:
            for stored in scheme.roles:
                info = self.finder.tensors.get(side_name(name, stored.suffix))
                if info is not None:
                    yield info

    def check_unused(self) -> None:
        """Note every tensor that no source reads, but for those that quantisers leave behind."""
        for name, info in self.finder.tensors.items():
            if info.name in self.used or (self.finder.schemes and is_ignored(name)):
                continue
            if not self._is_empty_bias(name, info):
                self.problems["unused"].append(info.name)

    def _is_empty_bias(self, name: str, info: TensorInfo) -> bool:
        """GPTQ quantisers write zeros beside matrices that never had a bias."""
        matrix = name.removesuffix(".bias") + ".weight"
        is_bias = name.endswith(".bias") and isinstance(self.sources.get(matrix), QuantisedSource)
        return is_bias and info.dtype in FLOATS and not read_slice(info).any()
