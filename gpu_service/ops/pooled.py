"""Sums of consecutive tokens' rows, weighed element by element by a softmax; requests keep the latest rows.

A row is values, then logits of their weights. Plain torch: few layers of a model do this, of few rows.
"""

from __future__ import annotations

import torch

from gpu_service.core.step import ForwardInputs


def pooled_rows(rows: torch.Tensor, recent: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
    """Returns the sums `[T, size]` of each row and those before it, as many as `recent` keeps.

    rows `[T, 2 * size]`; recent `[slots, kept, 2 * size]`: each request's latest rows before the step, oldest
    first, in slots `inputs.state_reads`; afterwards those after it, in slots `inputs.state_writes`. Sums of
    fewer rows than a request has are of no use, and hold anything. Computed in float32, of the rows' dtype.
    Nothing is asked of the host.
    """
    reads, writes = inputs.state_reads, inputs.state_writes
    assert reads is not None
    assert writes is not None
    starts, kept = inputs.query_start_loc_tensor, recent.shape[1]
    row = torch.arange(rows.shape[0], device=rows.device)
    requests = torch.searchsorted(starts[1:], row.to(starts.dtype), right=True).clamp_(max=reads.shape[0] - 1)
    gathered = _earlier(rows, row, recent[reads], starts[:-1].long(), requests, range(kept, -1, -1)).float()
    ends, every = starts[1:].long() - 1, torch.arange(reads.shape[0], device=rows.device)
    latest = _earlier(rows, ends, recent[reads], starts[:-1].long(), every, range(kept - 1, -1, -1))
    recent.index_copy_(0, writes, latest)
    values, logits = gathered.chunk(2, dim=-1)
    return (values * logits.softmax(1)).sum(1).to(rows.dtype)


def _earlier(
    rows: torch.Tensor,
    of: torch.Tensor,
    recent: torch.Tensor,
    starts: torch.Tensor,
    requests: torch.Tensor,
    places: range,
) -> torch.Tensor:
    """Returns the rows `places` before some, `[len(of), len(places), 2 * size]`.

    recent `[R, kept, 2 * size]`, starts int64 `[R]`: by request; `requests` says which one each of `of` has.
    """
    at = of[:, None] - torch.arange(places.start, places.stop, places.step, device=rows.device)
    first, kept = starts[requests][:, None], recent.shape[1]
    before = recent[requests[:, None], (at - first + kept).clamp(0, kept - 1)]
    return torch.where((at >= first)[..., None], rows[at.clamp(min=0)], before)
