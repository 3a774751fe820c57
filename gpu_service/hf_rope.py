"""The two ways checkpoints spell rotary embedding, read into one `RopeConfig`."""

from __future__ import annotations

from gpu_service.hf_keys import HfKeys
from gpu_service.model_config import RopeConfig
from gpu_service.ops.rope import INVERSE_FREQUENCIES

_KIND_KEYS = ("rope_type", "type")


def _scaling(rope: HfKeys | None) -> tuple[str, tuple[tuple[str, float], ...]]:
    """Kind and the numbers it needs."""
    if rope is None:
        return "default", ()
    kind = rope.string(*_KIND_KEYS, default="default")
    if kind not in INVERSE_FREQUENCIES:
        raise rope.error("rope_type", kind, ", ".join(sorted(INVERSE_FREQUENCIES)))
    names, _ = INVERSE_FREQUENCIES[kind]
    numbers = tuple((name, rope.number(name)) for name in names)
    if rope.unread:
        raise rope.error(rope.unread[0], "...", f"keys of {kind} scaling: {', '.join(names) or 'none'}")
    return kind, numbers


def read_rope(hf: HfKeys, head_dim: int, *, default_partial_factor: float) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` + `partial_rotary_factor`."""
    nested = hf.section("rope_parameters")
    if nested is not None:
        hf.skip("rope_theta", "partial_rotary_factor", "rope_scaling")
        theta = nested.number("rope_theta")
        factor = nested.number("partial_rotary_factor", default=default_partial_factor)
        kind, scaling = _scaling(nested)
    else:
        theta = hf.number("rope_theta", default=10000.0)
        factor = hf.number("partial_rotary_factor", default=default_partial_factor)
        kind, scaling = _scaling(hf.section("rope_scaling"))
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise hf.error(
            "partial_rotary_factor", factor, f"an even number of the {head_dim} elements of a head"
        )
    return RopeConfig(theta, rotary_dim, False, kind, scaling)
