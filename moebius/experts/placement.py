"""Which routed experts are resident on GPUs: the same decision by engine, expert servers and planning.

Because a larger number only takes more of the same ranking, what is resident at one ratio stays resident at
every larger one.

What was recorded of routing: how often each expert was chosen; kept in safetensors or JSON files.

Both forms hold the same: `counts` int64 [layers, experts] and `distinct` int64 [layers], where recorded
`pass_counts` int32 [steps, layers, experts] and `token_ids` int16 [tokens, layers, top_k] (-1: a choice that
has no weights), and as metadata the other fields of `ExpertStatistics`. Rows are the model's MoE layers in
ascending order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from moebius.config import PlacementConfig
from moebius.errors import UserError
from moebius.models.geometry import MoeGeometry


@dataclass(frozen=True)
class Placement:
    """Filled by `make_placement`; the same on every rank."""

    num_experts: int
    # Resident expert ids, ascending, of every MoE layer of the model; layers without any have an empty tuple.
    resident: Mapping[int, tuple[int, ...]]

    @staticmethod
    def of(geometry: MoeGeometry, pairs: Iterable[tuple[int, int]]) -> Placement:
        """Returns a placement of (layer, expert) pairs.

        Raises ValueError for a pair that the model lacks or that comes twice.
        """
        chosen: dict[int, set[int]] = {layer: set() for layer in geometry.moe_layers}
        for layer, expert in pairs:
            if layer not in chosen or not 0 <= expert < geometry.num_experts:
                raise ValueError(f"layer {layer} of this model has no expert {expert}")
            if expert in chosen[layer]:
                raise ValueError(f"expert {expert} of layer {layer} is placed twice")
            chosen[layer].add(expert)
        resident = {layer: tuple(sorted(experts)) for layer, experts in chosen.items()}
        return Placement(geometry.num_experts, resident)

    @property
    def count(self) -> int:
        """Resident experts over all layers."""
        return sum(map(len, self.resident.values()))

    @property
    def covers_everything(self) -> bool:
        """Returns whether no layer needs an expert server."""
        return all(len(experts) == self.num_experts for experts in self.resident.values())

    def is_whole(self, layer: int) -> bool:
        """Returns whether all experts of the layer are resident."""
        return len(self.resident[layer]) == self.num_experts


def parse_layers(
    text: str, moe_layers: Sequence[int], num_layers: int, setting: str = "gpu_layers"
) -> tuple[int, ...]:
    """Returns the layers of a list such as `0-1,9,20-`, ascending; empty text: none.

    A range without an end has all layers with routed experts from its first on, which may be none.
    Raises UserError naming `setting` and what is not a number or a range, not a layer of the model, or a
    layer without experts.
    """
    chosen: set[int] = set()
    for part in (part.strip() for part in text.split(",") if part.strip()):
        first, dash, last = part.partition("-")
        if first.strip().isdecimal() and dash and not last.strip():
            chosen.update(layer for layer in moe_layers if layer >= int(first))
            continue
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise UserError(
                f"{setting}: {part!r} is not allowed; allowed: layers and ranges, as in 0-1,9,20-"
            )
        begin, end = int(first), int(last) if dash else int(first)
        if end < begin:
            raise UserError(f"{setting}: {part!r} is not allowed; a range begins with its smaller layer")
        if end >= num_layers:
            raise UserError(f"{setting}: layer {end} does not exist; the model has layers 0-{num_layers - 1}")
        chosen.update(range(begin, end + 1))
    without = sorted(chosen - set(moe_layers))
    if without:
        raise UserError(
            f"{setting}: layer {without[0]} has no routed experts; allowed: {format_layers(moe_layers)}"
        )
    return tuple(sorted(chosen))


def format_layers(layers: Sequence[int]) -> str:
    """Returns `0-3,9` for (0, 1, 2, 3, 9); `none` when empty."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ",".join("-".join(map(str, run)) for run in runs) or "none"


KIND = "moebius.expert_statistics"
VERSION = 1
FileFormat = Literal["safetensors", "json"]
_ARRAYS = {"counts": np.int64, "distinct": np.int64, "pass_counts": np.int32, "token_ids": np.int16}


@dataclass(frozen=True, eq=False)
class ExpertStatistics:
    """Filled by `ExpertRecorder.dump` or `read`."""

    model_type: str
    num_experts: int
    top_k: int
    # MoE layers, ascending; the rows of all arrays.
    layers: tuple[int, ...]
    mode: str
    # Forward passes, and token rows in them, that were recorded; those without room for details included.
    steps: int
    tokens: int
    counts: NDArray[np.int64]  # int64 [layers, experts]: rows that chose the expert.
    # int64 [layers]: summed over steps, how many different experts the step's rows chose.
    distinct: NDArray[np.int64]
    # Mode per_pass: int32 [steps, layers, experts]. Mode per_token: int16 [tokens, layers, top_k].
    pass_counts: NDArray[np.int32] | None = None
    token_ids: NDArray[np.int16] | None = None

    def counts_by_layer(self) -> Mapping[int, NDArray[np.int64]]:
        """Layer -> counts of its experts."""
        return dict(zip(self.layers, self.counts, strict=True))

    def distinct_per_step(self) -> dict[int, float]:
        """Layer -> mean number of different experts in a step; what a step's weight traffic follows from."""
        return {
            layer: float(total) / max(1, self.steps)
            for layer, total in zip(self.layers, self.distinct, strict=True)
        }

    def check_model(self, geometry: MoeGeometry, path: str) -> None:
        """Raises UserError naming what differs when these are another model's."""
        ours = (geometry.model_type, geometry.num_experts, geometry.moe_layers)
        for name, found, wanted in zip(
            ("model_type", "num_experts", "layers"),
            (self.model_type, self.num_experts, self.layers),
            ours,
            strict=True,
        ):
            if found != wanted:
                raise UserError(
                    f"expert_statistics: {path} was recorded of another model: {name} is {found}, "
                    f"this model's {wanted}"
                )

    def encode(self, file_format: FileFormat) -> bytes:
        """Returns the file's content."""
        if file_format == "json":
            document = self._metadata() | {name: array.tolist() for name, array in self._arrays().items()}
            return json.dumps(document).encode()
        content: bytes = save(self._arrays(), {KIND: json.dumps(self._metadata())})
        return content

    @staticmethod
    def read(path: str, setting: str = "expert_statistics") -> ExpertStatistics:
        """Reads either form. Raises UserError naming the setting, the file and what is wrong with it."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{setting}: {path} cannot be read: {error.strerror}") from error
        try:
            return _decode(content)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(
                f"{setting}: {path} is not a file of recorded expert statistics: {error}"
            ) from error
        except Exception as error:  # the safetensors library's own error type has no stable import path
            if type(error).__module__.startswith("safetensors"):
                raise UserError(f"{setting}: {path} is damaged: {error}") from error
            raise

    def _metadata(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "version": VERSION,
            "model_type": self.model_type,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "layers": list(self.layers),
            "mode": self.mode,
            "steps": self.steps,
            "tokens": self.tokens,
        }

    def _arrays(self) -> dict[str, NDArray[Any]]:
        found = {name: getattr(self, name) for name in _ARRAYS}
        return {name: np.ascontiguousarray(array) for name, array in found.items() if array is not None}


def _decode(content: bytes) -> ExpertStatistics:
    arrays: dict[str, Any]
    if content.lstrip()[:1] == b"{":
        document = json.loads(content)
        arrays = {name: np.array(document[name], kind) for name, kind in _ARRAYS.items() if name in document}
    else:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        document = json.loads(header["__metadata__"][KIND])
        arrays = {name: array.astype(_ARRAYS[name]) for name, array in load(content).items()}
    if document.get("kind") != KIND or document.get("version") != VERSION:
        raise ValueError(f"its kind is {document.get('kind')!r}, its version {document.get('version')!r}")
    layers = tuple(int(layer) for layer in document["layers"])
    num_experts = int(document["num_experts"])
    if arrays["counts"].shape != (len(layers), num_experts):
        raise ValueError(f"counts have shape {list(arrays['counts'].shape)}")
    return ExpertStatistics(
        str(document["model_type"]),
        num_experts,
        int(document["top_k"]),
        layers,
        str(document["mode"]),
        int(document["steps"]),
        int(document["tokens"]),
        **arrays,
    )


Pair = tuple[int, int]


@dataclass(frozen=True)
class Candidates:
    """What may become resident; filled by `make_placement`."""

    # Ascending; layers that are resident as a whole are not among them.
    layers: tuple[int, ...]
    num_experts: int
    seed: int
    # Layer -> how often each expert was chosen, int64 [num_experts]; None without a statistics file.
    counts: Mapping[int, NDArray[np.int64]] | None = None


@dataclass(frozen=True)
class Strategy:
    """One way to rank, which for `adaptive` is what serving begins with."""

    rank: Callable[[Candidates], list[Pair]]
    # Whether a number per layer holds for each layer, or only as their sum.
    keeps_layer_counts: bool = True
    takes_statistics: bool = False


def spread(size: int) -> list[int]:
    """Returns 0 ... size - 1 in an order whose every prefix is spread evenly: the van der Corput sequence.

    Its i-th element is i with the binary digits mirrored; positions beyond `size` are left out.
    """
    bits = max(1, (size - 1).bit_length())
    mirrored = (int(format(i, f"0{bits}b")[::-1], 2) for i in range(1 << bits))
    return [position for position in mirrored if position < size]


def _uniform(candidates: Candidates) -> list[Pair]:
    """Round after round one expert of each layer, so that layers never differ by more than one.

    Layers take turns in spread order; each begins elsewhere among the ids, so that no id is preferred.
    """
    ids, count = spread(candidates.num_experts), candidates.num_experts
    layers = [candidates.layers[position] for position in spread(len(candidates.layers))]
    return [(layer, (expert + layer) % count) for expert in ids for layer in layers]


def _frequency(candidates: Candidates) -> list[Pair]:
    """Most often chosen first; among equals, the earlier layer and the smaller id."""
    if candidates.counts is None:
        raise ValueError("the strategy 'frequency' needs counts")
    counts = candidates.counts
    pairs = [(layer, expert) for layer in candidates.layers for expert in range(candidates.num_experts)]
    return sorted(pairs, key=lambda pair: (-int(counts[pair[0]][pair[1]]), pair))


def _front_loading(candidates: Candidates) -> list[Pair]:
    """The first layers wholly, then the next."""
    return [(layer, expert) for layer in candidates.layers for expert in range(candidates.num_experts)]


def _random(candidates: Candidates) -> list[Pair]:
    """Every order is as likely as any other; the seed decides."""
    pairs = _front_loading(candidates)
    random.Random(candidates.seed).shuffle(pairs)
    return pairs


def _adaptive(candidates: Candidates) -> list[Pair]:
    """By recorded counts where there are any, else evenly spread: requests then say what is better."""
    return _uniform(candidates) if candidates.counts is None else _frequency(candidates)


STRATEGIES: Mapping[str, Strategy] = {
    "adaptive": Strategy(_adaptive, takes_statistics=True),
    "uniform": Strategy(_uniform),
    "frequency": Strategy(_frequency, takes_statistics=True),
    "front-loading": Strategy(_front_loading, keeps_layer_counts=False),
    "random": Strategy(_random),
}


def make_placement(config: PlacementConfig, geometry: MoeGeometry) -> Placement:
    """Whole layers first; in all others as many experts as `gpu_experts` or `gpu_experts_ratio` say.

    Deterministic: ranks need not exchange it. Raises UserError naming the setting.
    """
    if config.gpu_experts is not None and config.gpu_experts_ratio is not None:
        raise UserError("gpu_experts and gpu_experts_ratio are both set; only one of them is allowed")
    if config.gpu_experts is not None and config.gpu_experts > geometry.num_experts:
        raise UserError(
            f"gpu_experts: {config.gpu_experts} is not allowed; there are {geometry.num_experts} per layer"
        )
    whole = parse_layers(config.gpu_layers, geometry.moe_layers, geometry.num_layers)
    chosen = [(layer, expert) for layer in whole for expert in range(geometry.num_experts)]
    others = tuple(layer for layer in geometry.moe_layers if layer not in whole)
    if others and (config.gpu_experts or config.gpu_experts_ratio):
        strategy = STRATEGIES[config.placement_strategy]
        counts = None
        if strategy.takes_statistics:
            counts = recorded_counts(config, geometry)
            if counts is None and config.placement_strategy == "frequency":
                raise UserError(
                    "placement_strategy is 'frequency', but expert_statistics is empty: it names a file"
                )
        candidates = Candidates(others, geometry.num_experts, config.placement_seed, counts)
        chosen += _take(config, strategy, candidates)
    return Placement.of(geometry, chosen)


def keeps_residents(config: PlacementConfig) -> bool:
    """Returns whether expert servers hold what is resident, too: then the placement may change
    while serving.
    """
    if config.drop_resident == "auto":
        return config.placement_strategy == "adaptive"
    return config.drop_resident == "keep"


def left_out(config: PlacementConfig, geometry: MoeGeometry) -> Mapping[int, tuple[int, ...]]:
    """Returns the experts that no server holds, by MoE layer: the resident ones, unless `keeps_residents`.

    Raises UserError as `make_placement`.
    """
    resident = make_placement(config, geometry).resident
    return dict.fromkeys(resident, ()) if keeps_residents(config) else resident


def _take(config: PlacementConfig, strategy: Strategy, candidates: Candidates) -> list[Pair]:
    if config.gpu_experts is not None and strategy.keeps_layer_counts:
        ranked = _by_layer if candidates.counts is None else _by_layer.__wrapped__
        experts = ranked(strategy.rank, candidates)
        return [(layer, expert) for layer in experts for expert in experts[layer][: config.gpu_experts]]
    ranking = strategy.rank(candidates)
    if config.gpu_experts is None:
        return ranking[: round((config.gpu_experts_ratio or 0.0) * len(ranking))]
    return ranking[: config.gpu_experts * len(candidates.layers)]


# A plan of memory asks for many numbers of the same experts.
@lru_cache(maxsize=16)
def _by_layer(rank: Callable[[Candidates], list[Pair]], candidates: Candidates) -> dict[int, list[int]]:
    """Returns each layer's experts in the order in which they become resident."""
    experts: dict[int, list[int]] = {}
    for layer, expert in rank(candidates):
        experts.setdefault(layer, []).append(expert)
    return experts


def recorded_counts(config: PlacementConfig, geometry: MoeGeometry) -> Mapping[int, NDArray[np.int64]] | None:
    """Counts int64 `[num_experts]` by layer, of the file `expert_statistics`; None: it names none.

    Raises UserError for a file that cannot be read, or is another model's.
    """
    if not config.expert_statistics:
        return None
    statistics = ExpertStatistics.read(config.expert_statistics)
    statistics.check_model(geometry, config.expert_statistics)
    return statistics.counts_by_layer()
