"""A part of a step with drafts: rows of which no one's state is another one's.

States of requests are read and written once for each row. A draft's row reads what the row before it wrote,
so layers with states compute a step depth by depth (`ForwardInputs.depths`): requests' own tokens, then their
first drafts, and so on. What comes after the last accepted draft is never read.

depth 0 | a: s1 -> s2 | b: s7 -> s8 |        slots that are read and written
depth 1 | a: s2 -> s3 | b: s8 -> s9 |
depth 2 | a: s3 -> s4 |
"""

from __future__ import annotations

import torch

from gpu_service.core.step import DepthRows, ForwardInputs


def make_depths(preceding: list[int]) -> list[DepthRows]:
    """From the number of drafts that come before each row."""
    by_depth: list[list[int]] = [[] for _ in range(max(preceding) + 1)]
    for row, depth in enumerate(preceding):
        by_depth[depth].append(row)
    return [DepthRows(rows, torch.tensor(rows)) for rows in by_depth]


def at_depth(inputs: ForwardInputs, depth: DepthRows) -> ForwardInputs:
    """Returns the step of these rows alone, each a request of one token; on the inputs' device."""
    index, count = depth.index, len(depth.rows)
    assert inputs.state_reads is not None
    assert inputs.state_writes is not None
    return ForwardInputs(
        input_ids=inputs.input_ids[index],
        positions=inputs.positions[index],
        slot_mapping=inputs.slot_mapping[index],
        block_table=inputs.block_table[index],
        query_start_loc=list(range(count + 1)),
        seq_lens=[inputs.seq_lens[row] for row in depth.rows],
        logits_indices=index,
        query_start_loc_tensor=torch.arange(count + 1, dtype=torch.int32, device=index.device),
        seq_lens_tensor=inputs.seq_lens_tensor[index],
        state_reads=inputs.state_reads[index],
        state_writes=inputs.state_writes[index],
    )
