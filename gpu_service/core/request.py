"""One output of one request, and the length algebra that replaces a phase flag.

    0 <= computed_len <= scheduled_len <= planned_len = len(prompt) + len(output) + inflight_tokens

`computed_len` tokens have their KV in the request's pages, `scheduled_len` will have it when the steps
in flight are done, `planned_len` also counts the token those steps sample, which only the device knows
yet. A request whose `scheduled_len` is short of `planned_len` has work; a step computes some of the
difference. Prefill, chunked prefill, decode and resume after preemption are all this rule. Drafts that a
step verifies (`gpu_service/speculation`) are in none of the lengths until it is committed: how many of them
count is unknown, and the request is in no other step before.

`SchedulerLimits` has what bounds a request and a step; requests beyond the bounds are refused, and outputs
that reach them end.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_service.core.constraint import OutputConstraint
from gpu_service.core.images import VisionPrompt

# Token ids int64 [n], and what is added to their logits, float32 [n].
Entries = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class BadWordEntries:
    """`SamplingParams.bad_words` as arrays; filled by the sampling plan."""

    lengths: npt.NDArray[np.int64]  # [n], tokens of each
    last_ids: npt.NDArray[np.int64]  # [n]
    # [n, longest - 1]: the ids before the last one, aligned at the end, -1 before them.
    prefixes: npt.NDArray[np.int64]


class FinishReason(enum.Enum):
    """Why an output ended; the value is what `GenerateComplete.finish_reason` carries."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Pooling(enum.IntEnum):
    """Which of a prompt's hidden states are wanted; the values are those of `protos/engine.proto`."""

    NONE = 0
    LAST = 1  # of its last token
    MEAN = 2  # of all its tokens, averaged


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated once, where the request enters; see `protos/engine.proto` for ranges."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    pooling: Pooling = Pooling.NONE

    @property
    def is_greedy(self) -> bool:
        """True when the largest (penalised) logit is taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Returns whether counts of the tokens so far are needed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position; filled by the sampler."""

    token_id: int
    logprob: float | None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One output being generated; compared by identity, never holds device tensors."""

    # Filled by the server when the request arrives.
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    index: int = 0
    priority: int = 0
    cache_namespace: str = ""
    fairness_id: str = ""  # whose request it is: clients get equal shares
    keep_prefix_s: float = 0.0  # For how long its pages outlive others in the prefix cache.
    arrived_s: float = 0.0  # When it arrived, by rank 0's monotonic clock.
    # Of several ranks: what rank 0 found of its prompt on disk, as `protos/ranks.proto` has it.
    blocks_on_disk: bytes = b""
    arrival: int = 0
    trace_context: dict[str, str] = field(default_factory=dict)
    # Of the trace that the call belongs to, hex, also when that is not recorded; filled by the servicer.
    trace_id: str = ""
    vision: VisionPrompt | None = None  # None: there is no image in the prompt.
    constraint: OutputConstraint | None = None  # of this output alone; None: it may be anything.

    # Filled by `bound` when it is queued: the ids that may end the output, and the tokens of the longest one.
    ending_ids: frozenset[int] = frozenset()
    longest_output: int = 0

    # Filled by the scheduler. The slot is fixed from admission to the end or the next preemption.
    slot: int = -1
    cached_len: int = 0
    scheduled_len: int = 0
    # Tokens being sampled by launched steps whose results are not committed: 0 or 1.
    inflight_tokens: int = 0
    num_preemptions: int = 0
    last_step: int = -1
    # It is in the open step of the prefill lane: no other step has it until that one has ended.
    in_lane: bool = False
    # Tokens to compute by what was in the prefix tree at the first lookup, while it waits; -1: none was.
    expected_len: int = -1
    # Positions that have counted for its client's share; cached ones do, too, at no cost.
    charged_len: int = 0

    # Filled by the request cache. The epoch changes when pages other than appended ones change.
    pages: list[int] = field(default_factory=list)
    pages_epoch: int = 0

    # Filled by the request cache, of models with linear attention: the slot of the state after
    # `scheduled_len` tokens, and those of states kept for the prefix tree, (tokens, slot) ascending.
    state_slot: int = 0
    snapshots: list[tuple[int, int]] = field(default_factory=list)

    # Filled by the scheduler when a step's results are committed.
    computed_len: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # float64 [H]: the sum of the prompt's hidden states that are pooled, computed so far; None: of none.
    pooled_sum: npt.NDArray[np.float64] | None = None
    finish_reason: FinishReason | None = None
    matched_stop_token: int | None = None
    error_message: str = ""

    # Filled by the sampling plan when first needed, and read in every step: `logit_bias`, and stop tokens
    # masked before `min_tokens`, and sequences that must not be completed.
    bias_entries: Entries | None = None
    stop_entries: Entries | None = None
    bad_word_entries: BadWordEntries | None = None

    # Draft tokens, those after `total_len`: of a device drafter, or of a host drafter while the first of
    # them is being sampled; filled by the scheduler and its speculation.
    drafts: Sequence[int] = ()
    # False: its steps verify no drafts; set where a draft's row was not finite, or where masks take long.
    speculates: bool = True
    drafts_source: int = 0  # A `DraftSource`, of the drafts that the next step verifies.
    # Of all its steps, how many draft tokens became output tokens, and how many did not.
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0

    reported_len: int = 0  # Filled by the engine: output tokens handed to the caller.

    # Prompt tokens; kept, because every step asks for it several times.
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt_token_ids)

    def bound(self, limits: SchedulerLimits) -> None:
        """Notes what ends the output, which every step asks for."""
        self.ending_ids = stop_token_ids(self, limits)
        self.longest_output = min(self.params.max_tokens, limits.context_limit - self.prompt_len)

    def add_prompt_logprobs(self, records: Sequence[TokenLogprobs], start: int) -> None:
        """Adds what is new of records from position `start` on; a prompt recomputed after a preemption brings
        some of it twice.
        """
        if self.params.prompt_logprobs is not None and not self.prompt_logprobs:
            self.prompt_logprobs.append(TokenLogprobs(self.prompt_token_ids[0], None))
        self.prompt_logprobs.extend(records[max(0, len(self.prompt_logprobs) - start) :])

    def add_pooled(self, step_sum: npt.NDArray[np.float32], from_start: bool) -> None:
        """Adds a step's sum of hidden states, float32 `[H]`; a prompt that is computed again from its start,
        after a preemption, begins a new sum."""
        earlier = None if from_start else self.pooled_sum
        self.pooled_sum = step_sum + (np.float64(0) if earlier is None else earlier)

    @property
    def pooled_states(self) -> npt.NDArray[np.float64] | None:
        """The hidden states that were asked for, float64 `[H]`; None: none were, or none is computed yet."""
        if self.pooled_sum is None:
            return None
        return self.pooled_sum / (self.prompt_len if self.params.pooling == Pooling.MEAN else 1)

    @property
    def key(self) -> str:
        """Unique over live outputs: the request id and which of its `n` outputs this is."""
        return f"{self.request_id}#{self.index}"

    @property
    def total_len(self) -> int:
        """Tokens whose ids the host knows."""
        return self.prompt_len + len(self.output_token_ids)

    @property
    def planned_len(self) -> int:
        """Tokens the host knows plus those being sampled."""
        return self.prompt_len + len(self.output_token_ids) + self.inflight_tokens

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end); `end` is at most `total_len`."""
        split = len(self.prompt_token_ids)
        if end <= split:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[max(0, start - split) : end - split]

    def prefix_keys(self, end: int) -> list[int]:
        """What stands for the tokens at positions [0, end) in the prefix tree: an image by its content."""
        tokens = self.known_tokens(0, end)
        return tokens if self.vision is None else self.vision.keyed(tokens)

    @property
    def finished(self) -> bool:
        """True once a finish reason is set."""
        return self.finish_reason is not None


MOST_TRACE_IDS = 16


def trace_fields(requests: Iterable[Request]) -> dict[str, Any]:
    """Returns fields for log lines: `trace_id` of one request, `trace_ids` of the first of several, nothing
    of none.
    """
    found = list(dict.fromkeys(request.trace_id for request in requests if request.trace_id))
    if len(found) == 1:
        return {"trace_id": found[0]}
    return {"trace_ids": found[:MOST_TRACE_IDS]} if found else {}


class RequestRefused(ValueError):
    """The request can never be served here; the message names the field and what is allowed."""


class QueueFull(RuntimeError):
    """Too many requests wait already; try again later."""


class EngineStopped(RuntimeError):
    """Nothing is computed any more, or soon will not be."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Filled once from the configuration and the KV pool's size; lengths in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    # Longest prompt + output: what the model allows and the whole KV pool can hold.
    context_limit: int
    # Pages left free when a request is admitted, so that running ones can grow before anyone is preempted.
    watermark_pages: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    # What a prompt token whose log-probability is asked for takes of the budget of tokens.
    scored_token_cost: int = 1
    # Most tokens of a step that streams its experts: the prefill lane's, or one in which no request decodes.
    prefill_chunk_max: int = 0
    # Most rows of a step with drafts, those of its requests included; 0: no step has any.
    max_rows: int = 0


def refuse_impossible(prompt_len: int, max_tokens: int, limits: SchedulerLimits) -> None:
    """Raises RequestRefused when prompt and output can not fit, alone in the pool, ever."""
    limit = limits.context_limit
    if prompt_len < 1:
        raise RequestRefused("tokenized.input_ids: at least one token is needed, got none")
    if prompt_len > limit - 1:
        raise RequestRefused(
            f"tokenized.input_ids: {prompt_len} prompt tokens leave no room for output; at most "
            f"{limit - 1} are allowed (context length {limit})"
        )
    if prompt_len + max_tokens > limit:
        raise RequestRefused(
            f"sampling_params.max_tokens: {prompt_len} prompt tokens + {max_tokens} exceed the context "
            f"length {limit}; at most {limit - prompt_len} are allowed"
        )


def stop_token_ids(request: Request, limits: SchedulerLimits) -> frozenset[int]:
    """Returns the ids that end the output (and that are masked before `min_tokens`)."""
    if request.params.ignore_eos:
        return request.params.stop_token_ids
    return request.params.stop_token_ids | limits.eos_token_ids


def mark_finish(request: Request, token_id: int) -> None:
    """Sets the finish reason if `token_id`, the last output token, ends the output."""
    is_stop = token_id in request.ending_ids
    if is_stop and len(request.output_token_ids) > request.params.min_tokens:
        request.finish_reason = FinishReason.STOP
        request.matched_stop_token = token_id
    elif request.constraint is not None and request.constraint.is_complete:
        request.finish_reason = FinishReason.STOP
    elif len(request.output_token_ids) >= request.longest_output:
        request.finish_reason = FinishReason.LENGTH
