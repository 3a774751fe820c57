"""Shapes of MoE layers that `moebius bench kernels` measures, and how its options are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

from moebius.errors import UserError
from moebius.kernels import Isa, supported_isas


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of one layer; filled by `parse_shape`."""

    name: str
    hidden_size: int
    # Rows of gate and up.
    intermediate_size: int
    num_experts: int
    top_k: int

    def operations(self, pairs: int) -> int:
        """Multiplications and additions when `pairs` (row, expert) pairs are computed: gate, up and down."""
        return 2 * 3 * self.hidden_size * self.intermediate_size * pairs


SHAPES = {
    shape.name: shape
    for shape in (
        ExpertShape("qwen3-30b-a3b", 2048, 768, 128, 8),
        ExpertShape("qwen3-next-80b", 2048, 512, 512, 10),
        ExpertShape("glm-4.7", 5120, 1536, 160, 8),
        ExpertShape("deepseek-v3", 7168, 2048, 256, 8),
        ExpertShape("minimax-m2", 3072, 1536, 256, 8),
    )
}


def parse_shape(text: str) -> ExpertShape:
    """A shape by its name, or HxIxExK: hidden size, intermediate size, experts, experts per row.

    Raises:
        UserError: neither of the two, or more experts per row than there are.
    """
    if text in SHAPES:
        return SHAPES[text]
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise UserError(
            f"--shape: {text!r} is not allowed; allowed: {', '.join(SHAPES)}, or HxIxExK with hidden size, "
            "intermediate size, experts and experts per row, e.g. 2048x768x128x8"
        )
    hidden_size, intermediate_size, num_experts, top_k = map(int, text.split("x"))
    if top_k > num_experts:
        raise UserError(
            f"--shape: {text!r} has {top_k} experts per row of {num_experts}; it can not exceed them"
        )
    return ExpertShape(text, hidden_size, intermediate_size, num_experts, top_k)


def parse_shapes(text: str) -> list[ExpertShape]:
    """Comma-separated shapes, or "all" for every named one. Raises UserError."""
    return list(SHAPES.values()) if text == "all" else [parse_shape(part) for part in text.split(",")]


def parse_counts(text: str, option: str) -> list[int]:
    """Comma-separated numbers >= 1. Raises UserError naming `option`."""
    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        raise UserError(
            f"{option}: {text!r} is not allowed; allowed: numbers from 1 to 9999999, comma separated"
        )
    return [int(part) for part in text.split(",")]


def parse_isa(text: str) -> Isa:
    """A level that this machine can run, or "auto". Raises UserError."""
    allowed = ("auto", *supported_isas())
    if text not in allowed:
        raise UserError(f"--isa: {text!r} is not allowed here; allowed: {', '.join(allowed)}")
    return cast(Isa, text)
