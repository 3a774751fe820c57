"""What a load will read and in which formats it will pack, checked before anything is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_checkpoint import ExpertCheckpoint, ExpertMatrices
from moebius.checkpoint.matrix_finder import is_ignored
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.checkpoint.rules import is_routed_expert
from moebius.expert_dtype import REQUANTISED, ExpertDtype


@dataclass(frozen=True)
class LoadPlan:
    """Filled by `plan_load`."""

    checkpoint: ExpertCheckpoint
    # Packed formats of every decoder layer, dense ones included (which take no memory).
    gate_up_formats: tuple[str, ...]
    down_formats: tuple[str, ...]
    has_bias: bool
    # By (layer, expert); located once, because threads that load share Python's lock.
    experts: Mapping[tuple[int, int], ExpertMatrices]
    # The intermediate dimension can be divided at multiples of this: groups and blocks stay whole.
    group: int
    # What packing rounds, for people, although formats are kept; ascending.
    roundings: tuple[str, ...] = ()

    @property
    def model(self) -> MoeGeometry:
        """Of the checkpoint."""
        return self.checkpoint.model

    @property
    def weight_format(self) -> str:
        """For people: the formats of all layers, most layers have one."""
        names = {self._name(layer) for layer in self.model.moe_layers}
        return ", ".join(sorted(names))

    def _name(self, layer: int) -> str:
        gate_up, down = self.gate_up_formats[layer], self.down_formats[layer]
        return gate_up if gate_up == down else f"{gate_up}/{down}"


def plan_load(model: MoeGeometry, model_path: str, expert_dtype: ExpertDtype = "keep") -> LoadPlan:
    """Find the experts and check all of them, this server's or not.

    Raises CheckpointError naming the first tensor that is missing, mis-shaped or of a type that can not be
    packed, a scheme that is not known, experts of one layer in different formats, or a tensor that belongs to
    an expert the configuration does not know.
    """
    checkpoint = ExpertCheckpoint.open(model_path, model)
    experts: dict[tuple[int, int], ExpertMatrices] = {}
    kept: dict[int, tuple[str, str]] = {}
    used: set[str] = set()
    groups: set[int] = set()
    biased: set[bool] = set()
    roundings: set[str] = set()
    for layer in model.moe_layers:
        for expert in range(model.num_experts):
            found = experts[layer, expert] = checkpoint.expert(layer, expert)
            if expert_dtype == "keep":
                found.check_kept()
            formats = found.formats
            if kept.setdefault(layer, formats) != formats and expert_dtype == "keep":
                raise CheckpointError(
                    f"{found.gate.name!r} and the experts before it in the layer differ in format: "
                    f"{formats} and {kept[layer]}; requantise them with --expert-dtype"
                )
            groups.add(found.neuron_multiple)
            biased.add(found.has_bias)
            for matrix in (found.gate, found.up, found.down):
                used.update(matrix.tensor_names)
                roundings.update({matrix.rounding} - {""} if expert_dtype == "keep" else ())
    _check_unused(checkpoint, used)
    first = kept[model.moe_layers[0]]
    target = REQUANTISED.get(expert_dtype)
    formats_of = [(target, target) if target else kept.get(n, first) for n in range(model.num_layers)]
    return LoadPlan(
        checkpoint,
        tuple(gate_up for gate_up, _ in formats_of),
        tuple(down for _, down in formats_of),
        any(biased),
        experts,
        math.lcm(*groups),
        tuple(sorted(roundings)),
    )


def _check_unused(checkpoint: ExpertCheckpoint, used: set[str]) -> None:
    """An expert tensor nobody asked for, in a layer that the model has: configuration and file differ."""
    model, prefix = checkpoint.model, checkpoint.layout.prefix
    for name in checkpoint.layout.index.tensors:
        if name in used or not is_routed_expert(name) or not name.startswith(prefix) or is_ignored(name):
            continue
        # Layers behind the last are multi-token prediction, which is not served.
        if int(name.removeprefix(prefix).split(".")[0]) < model.num_layers:
            raise CheckpointError(
                f"tensor {name!r} is an expert's, but the configuration has {model.num_experts} experts "
                f"in layers {list(model.moe_layers)}: it would be left unused"
            )
