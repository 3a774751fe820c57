"""Comparing an op's implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_service.ops import examples
from gpu_service.ops.registry import Op
from tests.tolerances import OP_ROUNDINGS


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _flat(part)]
    return []


def _by_expert(op_name: str, result: Any) -> Any:
    """A router's choices in a row have no order: as weights by expert."""
    if op_name not in ("route", "add_norm_route"):
        return result
    *seam, weights, ids = result
    return *seam, torch.zeros(ids.shape[0], 1024, device=ids.device).scatter_(1, ids.long(), weights)


def assert_same_op(
    op: Op[..., Any],
    implementation: Callable[..., Any],
    arguments: Callable[[], tuple[Any, ...]],
    dtype: torch.dtype,
) -> None:
    """Results, and what became of the arguments written to, agree with the reference's.

    `arguments` makes fresh ones at each call. Tensors that an op may overwrite without saying with what
    are not compared: those are the first of an activation, of the qk-norm and of the fused addition.
    """
    theirs, ours = arguments(), arguments()
    expected = _by_expert(op.name, op.reference(*theirs))
    computed = _by_expert(op.name, implementation(*ours))
    tolerance = OP_ROUNDINGS[dtype]
    for got, wanted in zip(_flat(computed)[: len(_flat(expected))], _flat(expected), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=4 * tolerance)
    scratch = {"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "qk_norm_rope", "fused_add_rms_norm"}
    scratch |= {"rotate_and_append"}
    # Of the fused projection also the update.
    skipped = 2 if op.name.startswith("add_norm_") else 1 if op.name in scratch else 0
    has_nan = op.name == "note_overflow"  # among its arguments
    for got, wanted in zip(_flat(ours)[skipped:], _flat(theirs)[skipped:], strict=True):
        torch.testing.assert_close(
            got.float(), wanted.float(), rtol=tolerance, atol=4 * tolerance, equal_nan=has_nan
        )


def example(op: Op[..., Any], device: torch.device, dtype: torch.dtype) -> Callable[[], tuple[Any, ...]]:
    """Returns the maker of the op's example arguments."""
    return lambda: examples.example(op.name, device, dtype)
