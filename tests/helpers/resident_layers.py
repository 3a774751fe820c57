"""One layer of packed random experts, some of them in slots, with routing to try it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_service.device.virtual_memory import PhysicalPool
from gpu_service.experts.resident.experts import LayerSlots, make_slots
from gpu_service.experts.resident.panels import layer_format
from moebius import _kernels_testing as testing
from moebius.kernels import ExpertEngine
from moebius.kernels.weight_formats import split_gate_up
from moebius.models.geometry import MoeGeometry
from tests.helpers.quantised_sources import SMALL_FORMATS

ALL_FORMATS = (
    "float32",
    "bfloat16",
    "float16",
    "fp8_block",
    "fp8_channel",
    "fp8_g128",
    "mxfp8",
    "int8",
    "int8_g16_f16",
    "int8_g32_mins",
    "int4_g32",
    "int4_g16_mins",
    "int4_g32_mins",
    *SMALL_FORMATS,
    "int4_g64_zeros_f16",
    "int4_g128_zeros",
    "int4_g32_ordered",
    "mxfp4",
    "nvfp4",
)
# Of gate and up: codes of different widths, values of different precision, planes.
MIXED_FORMATS = ("int8_g32_f16+int4_g32_zeros", "bfloat16+mxfp4", "iq2_xxs_grid_products+int6_g16_products")
EXPERT_FORMATS = (*ALL_FORMATS, *MIXED_FORMATS)


@dataclass(frozen=True)
class Shape:
    """Sizes that are multiples of nothing by default, so that padding is met everywhere."""

    hidden: int = 72
    intermediate: int = 24
    experts: int = 5
    top_k: int = 2
    activation: str = "silu"
    has_bias: bool = False
    limit: float = 7.0

    @property
    def geometry(self) -> MoeGeometry:
        """One layer, number 0."""
        return MoeGeometry(
            "qwen3_moe",
            self.hidden,
            1,
            (0,),
            self.experts,
            self.top_k,
            self.intermediate,
            self.activation,
            "float32",
        )

    def engine(self, weight_format: str) -> ExpertEngine:
        """Returns an expert server's engine of the layer, with random weights."""
        engine = ExpertEngine(
            self.hidden,
            self.intermediate,
            self.experts,
            1,
            weight_format=weight_format,
            down_format=with_down(weight_format)[1],
            activation=self.activation,
            limit=self.limit,
            has_bias=self.has_bias,
            num_threads=1,
        )
        testing.fill_random(engine.backend, 0, 3)
        return engine


def with_down(weight_format: str) -> tuple[str, str]:
    """Returns the formats of gate and up, and of down, which is never ordered."""
    return weight_format, split_gate_up(weight_format)[1].removesuffix("_ordered")


def resident_layer(
    shape: Shape,
    weight_format: str,
    experts: tuple[int, ...],
    device: str = "cpu",
    pool: PhysicalPool | None = None,
) -> LayerSlots:
    """Returns random weights of a packed format; `experts` in slots, in that order, and one empty slot.

    `pool`: what the slots' memory is mapped from; slots of no expert have none then. Where the format is
    ordered each expert has another order.
    """
    engine = shape.engine(weight_format)
    sizes = shape.hidden, shape.intermediate, shape.has_bias, shape.geometry.is_gated
    kind = layer_format(*with_down(weight_format), *sizes)
    count = len(experts) + (pool is None)
    slots = make_slots(kind, count, shape.experts, torch.device(device), shape.limit, pool)
    for slot, expert in enumerate(experts):
        packed = np.array(engine.packed_expert(0, expert))
        if kind.gate_up.ordered:
            order = packed[kind.layout.order_offset :].view(np.uint32)
            order[: shape.hidden] = np.random.default_rng(expert).permutation(shape.hidden)
        slots.put(slot, expert, torch.from_numpy(packed))
    return slots


def routed(
    shape: Shape, rows: int, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden states, ids (a tenth of them -1) and weights of random rows."""
    generator = torch.Generator().manual_seed(seed)

    def put(tensor: torch.Tensor) -> Any:
        return tensor.to(device)

    order = torch.rand(rows, shape.experts, generator=generator).argsort(dim=1)
    ids = order[:, : shape.top_k].int()
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    hidden_states = torch.randn(rows, shape.hidden, generator=generator).to(dtype)
    weights = torch.rand(ids.shape, generator=generator)
    return put(hidden_states), put(ids.contiguous()), put(weights)
