"""Decode steps for `gpu_service.attention.fused_decode`: queries and keys before norm and rotation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.ops.rope import RopeTable, Unrotated, rope_table
from tests.helpers.attention_cases import LAYER, Case, make_inputs


@dataclass(frozen=True, slots=True)
class Options:
    """What models differ in."""

    norms: bool = True
    # Elements of a head that rotate; 0: all of them.
    rotary_dim: int = 0
    interleaved: bool = False


def unrotated(case: Case, options: Options) -> Unrotated:
    """Returns the case's queries and keys side by side, as a projection leaves them, with random norms."""
    geometry, positions = case.geometry, case.inputs.positions
    rotary_dim = options.rotary_dim or geometry.head_dim
    exponents = torch.arange(rotary_dim // 2, device=positions.device) / (rotary_dim // 2)
    frequencies = 100.0**-exponents
    table: RopeTable = rope_table.reference(positions, frequencies, geometry.dtype, options.interleaved)
    generator = torch.Generator().manual_seed(5)
    norms = 1 + torch.randn(2, geometry.head_dim, generator=generator) / 4
    q_weight, k_weight = norms.to(positions.device, geometry.dtype) if options.norms else (None, None)
    heads = torch.cat((case.query, case.key), dim=1)
    return Unrotated(heads, q_weight, k_weight, 1e-6, geometry.num_heads, table)


def as_decode_rows(case: Case) -> Case:
    """Returns the same step with a request for each of its tokens, as draft tokens and short prompts are."""
    starts, lengths = case.inputs.query_start_loc, case.inputs.seq_lens
    rows = [(end - begin, length) for (begin, end), length in zip(pairwise(starts), lengths, strict=True)]
    shape = [(length - new + n, 1) for new, length in rows for n in range(new)]
    counts = torch.tensor([new for new, _ in rows], device=case.inputs.block_table.device)
    table = case.inputs.block_table.repeat_interleave(counts, dim=0)
    return replace(case, inputs=make_inputs(shape, table, case.inputs.slot_mapping))


def attend(backend: AttentionBackend, case: Case, options: Options) -> torch.Tensor:
    """Plans and computes the step."""
    backend.plan(case.inputs)
    return backend.forward_unrotated(unrotated(case, options), case.value, LAYER, case.layer)
