"""A long output of a served model, with the log-probabilities that the server reports for it.

What is asked is what every client of the completions API may ask, so that all that serves is judged: captured
graphs, several expert servers, drafts, replicas behind a router. A server reports log-probabilities of its
most probable tokens before temperature and penalties; vLLM's option for token ids in place of texts keeps
apart tokens that are spelt alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from app.client import ApiClient
from moebius.config.request_limits import MAX_LOGPROBS
from moebius.errors import UserError

_TOKEN = re.compile(r"token_id:(\d+)")


@dataclass(frozen=True)
class LongOutput:
    """N generated tokens; filled by `ask_long_output`."""

    name: str  # "greedy" or "sampled"
    prompt_ids: torch.Tensor  # int64 [P]
    token_ids: torch.Tensor  # int64 [N]
    # Most probable tokens int64 [N, K] by the server, -1 where it names fewer, and natural log-probabilities
    # float64 [N, K].
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @property
    def sequence(self) -> torch.Tensor:
        """Returns prompt and output, int64 `[P + N]`."""
        return torch.cat([self.prompt_ids, self.token_ids])

    @property
    def served_top(self) -> torch.Tensor:
        """Returns the most probable token by the server at each place, int64 `[N]`."""
        best = self.top_logprobs.argmax(dim=1, keepdim=True)
        return self.top_ids.gather(1, best).squeeze(1)


# What is asked for besides prompt and length, by the name of the output.
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "top_p": 1, "top_k": -1},
}


def ask_long_output(
    client: ApiClient,
    model: str,
    name: str,
    prompt_ids: Sequence[int],
    tokens: int,
    seed: int,
    on_tokens: Callable[[int], None],
) -> LongOutput:
    """Returns exactly `tokens` tokens after the prompt; `name` is one of `SAMPLINGS`.

    `on_tokens` is called with the number of tokens so far. Raises UserError with the server's words, or
    naming what its answer lacks.
    """
    body = {
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": tokens,
        # No end before: the end token stays masked, and the text goes on as text.
        "min_tokens": tokens,
        "seed": seed,
        "logprobs": MAX_LOGPROBS,
        "return_tokens_as_token_ids": True,
        **SAMPLINGS[name],
    }
    token_ids: list[int] = []
    tops: list[dict[int, float]] = []
    for event in client.events("/v1/completions", body):
        for choice in event.get("choices", []):
            scored = choice.get("logprobs") or {}
            token_ids += [_token_id(token) for token in scored.get("tokens", [])]
            tops += [
                {_token_id(token): value for token, value in top.items()}
                for top in scored.get("top_logprobs") or []
            ]
        on_tokens(len(token_ids))
    if len(token_ids) != tokens or len(tops) != tokens:
        raise UserError(
            f"the server gave {len(token_ids)} tokens and log-probabilities of {len(tops)}; "
            f"needed are {tokens} of each"
        )
    return make_long_output(name, prompt_ids, token_ids, tops)


def make_long_output(
    name: str, prompt_ids: Sequence[int], token_ids: Sequence[int], tops: Sequence[Mapping[int, float]]
) -> LongOutput:
    """`tops` has the log-probability of each of the most probable tokens, one entry for each output token."""
    width = max(map(len, tops))
    ids = torch.full((len(tops), width), -1, dtype=torch.int64)
    logprobs = torch.full((len(tops), width), -torch.inf, dtype=torch.float64)
    for place, top in enumerate(tops):
        ids[place, : len(top)] = torch.tensor(list(top), dtype=torch.int64)
        logprobs[place, : len(top)] = torch.tensor(list(top.values()), dtype=torch.float64)
    return LongOutput(name, torch.tensor(prompt_ids), torch.tensor(token_ids), ids, logprobs)


def _token_id(token: str) -> int:
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise UserError(
            f"the server calls a token {token!r}; needed are ids as in token_id:17 "
            "(return_tokens_as_token_ids, as Moebius and vLLM have it)"
        )
    return int(found[1])
