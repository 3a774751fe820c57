"""One output of one request, and the length algebra that replaces a phase flag.

    0 <= cached_len <= computed_len <= scheduled_len <= total_len = len(prompt) + len(output)

`computed_len` tokens have their KV in the request's pages. A request whose `computed_len` is short of
`total_len` has work; a step computes some of the difference. Prefill, chunked prefill, decode, resume
after preemption and (later) speculation are all this rule.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why an output ended; the value is what `GenerateComplete.finish_reason` carries."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


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

    @property
    def is_greedy(self) -> bool:
        """True when the largest (penalised) logit is taken."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position; filled by the sampler."""

    token_id: int
    logprob: float | None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """One output being generated; compared by identity, never holds device tensors."""

    # Filled by the server when the request arrives.
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    index: int = 0
    priority: int = 0
    cache_namespace: str = ""
    arrival: int = 0
    trace_context: dict[str, str] = field(default_factory=dict)

    # Filled by the scheduler.
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    cached_len: int = 0
    scheduled_len: int = 0
    num_preemptions: int = 0

    # Filled by the engine when a step's results are committed.
    computed_len: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop_token: int | None = None
    error_message: str = ""

    @property
    def key(self) -> str:
        """Unique over live outputs: the request id and which of its `n` outputs this is."""
        return f"{self.request_id}#{self.index}"

    @property
    def prompt_len(self) -> int:
        """Prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def total_len(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        """True once a finish reason is set."""
        return self.finish_reason is not None
