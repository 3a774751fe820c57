"""Segments of servers whose experts say which ones they are: for simulated devices that read them late."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from gpu_service.experts.resident.panels import layer_format
from moebius.kernels.weight_segment import SegmentLayer
from tests.helpers.resident_layers import Shape
from tests.helpers.stored_experts import MadeSegment, Part

SHAPE = Shape(hidden=16, intermediate=32, experts=7, top_k=2)
LAYERS = 3


def marked_segment(part: Part, server: int = 0) -> MadeSegment:
    """Every expert's bytes say which one it is, whose, and of which generation."""
    kind = layer_format("int8", "int8", SHAPE.hidden, part.end - part.begin, False)
    layers, end = {}, 0
    for layer in range(LAYERS):
        layers[layer] = SegmentLayer(
            layer, end, kind.expert_bytes, part.experts, "int8", "int8", False, SHAPE.hidden,
            part.begin, part.end,
        )  # fmt: skip
        end += layers[layer].nbytes
    segment = MadeSegment(np.zeros(end, dtype=np.uint8), layers)
    write_marks(segment, server)
    return segment


def write_marks(segment: MadeSegment, server: int) -> None:
    """What a server does when it loads."""
    for layer in segment.layers.values():
        rows = segment.data[layer.offset : layer.offset + layer.nbytes].reshape(-1, layer.expert_bytes)
        rows[:, 0], rows[:, 1] = layer.layer, layer.experts
        rows[:, 2], rows[:, 3] = server, segment.generation % 256


def load_again(rng: random.Random, segments: Sequence[MadeSegment]) -> None:
    """A server replaces its weights: begins, or ends what it has begun."""
    for server, segment in enumerate(segments):
        if not segment.is_complete:
            write_marks(segment, server)
            segment.is_complete = True
            return
    segment = rng.choice(segments)
    segment.is_complete = False
    segment.generation += 1
    # What is copied now is nothing.
    segment.data[:] = 255
