"""How long a call takes on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UPS, _CALLS = 5, 20


def mean_seconds(call: Callable[[], object]) -> float:
    """Returns the seconds of a call on the current GPU and stream, the mean of some after others."""
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begin, end = (event(enable_timing=True) for _ in range(2))
    for _ in range(_WARM_UPS):
        call()
    begin.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _CALLS
