"""What a step did, on the host: for each request of its batch, and as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpu_service.core.request import TokenLogprobs

# What outputs end with whose step computed no number.
NON_FINITE_LOGITS = (
    "the model produced NaN or Inf logits for this request, or what it asked for left no token to choose"
)
# Where float16 is what overflowed, but after all layers, or was asked for too much.
NON_FINITE_IN_FLOAT16 = f"{NON_FINITE_LOGITS} (float16 holds at most 65504; --dtype bfloat16 holds more)"
FLOAT16_OVERFLOW = "float16 overflow:"


@dataclass(slots=True)
class RowResult:
    """What a step did for one request; filled by the engine from the sampler's output."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    # Position of the token that prompt_logprobs[0] is about.
    prompt_logprobs_start: int = 0
    # float32 [H]: the sum of the hidden states that are pooled; None: of none in this step.
    pooled_sum: npt.NDArray[np.float32] | None = None
    # Whether the step computed the prompt's first token, so that no earlier sum counts.
    pooled_from_start: bool = False
    # Not empty: the request ends with this error.
    error: str = ""
    # Of the rows of its drafts, in order.
    verified: Sequence[RowResult] = ()
    # What a device drafter proposes for the request's next step.
    drafts: Sequence[int] = ()


@dataclass(slots=True)
class StepResult:
    """Host values of one step; filled by `to_result`, `num_replays` and `seconds` by the step runner."""

    # In batch order; none where `token_ids` says it all.
    rows: list[RowResult] = field(default_factory=list)
    # Layers after which a row first was not finite; empty where that is not noted.
    nonfinite_layers: frozenset[int] = frozenset()
    # Whether a share of its experts was streamed, and what it should take by their costs; None: that is not
    # known.
    is_streamed: bool = False
    # Whether copies of experts to the device ran beside the step; None: that is not known.
    has_copies: bool | None = False
    predicted_seconds: float | None = None
    num_replays: int = 0
    seconds: float = 0.0
    # int32 [3, L, T, K] of a step that is sampled: the experts that its rows chose in some layers, those of
    # them that are not resident, and those left to servers; -1 elsewhere.
    choices: npt.NDArray[np.int32] | None = None
    # Of nearly all steps: the token of each request, of which nothing else came.
    token_ids: list[int] | None = None
