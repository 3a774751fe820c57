"""The token details that requests can ask for, in vLLM's shapes: ids, and the prompt's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.generation.job import Prepared, PromptJob
from gateway.generation.output import alternatives, finite, token_text
from gateway.text.tokenizer import Tokenizer


class TokenDetails:
    """The additional fields of one response; made by its route."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer) -> None:
        fields = prepared.fields
        self._jobs = prepared.jobs
        self._outputs_per_prompt = fields.n or 1
        self._tokenizer = tokenizer
        # Whether ids of output tokens are returned.
        self.wants_ids = bool(fields.return_token_ids)
        self._num_prompt_logprobs = fields.prompt_logprobs

    def of_output(self, token_ids: Sequence[int], whole: bool = False) -> dict[str, Any]:
        """Returns the details for a choice with these tokens; `whole`: in a non-streamed answer."""
        if self.wants_ids:
            return {"token_ids": list(token_ids)}
        return {"token_ids": None} if whole else {}

    def of_prompt(self, index: int, whole: bool = False) -> dict[str, Any]:
        """Returns the details of the prompt of output `index`; `whole`: in a non-streamed answer."""
        job = self._jobs[index // self._outputs_per_prompt]
        details: dict[str, Any] = {"prompt_token_ids": list(job.prompt_ids)} if self.wants_ids else {}
        if whole:
            count = self._num_prompt_logprobs
            details.setdefault("prompt_token_ids", None)
            details["prompt_logprobs"] = None if count is None else self._prompt_logprobs(job, count)
        return details

    def _prompt_logprobs(self, job: PromptJob, count: int) -> list[dict[str, Any] | None]:
        """Returns per prompt token: null for the first, else itself and the `count` likeliest by id."""
        scored = job.input_logprobs
        entries: list[dict[str, Any] | None] = []
        for position, token_id in enumerate(scored.token_ids if scored is not None else ()):
            assert scored is not None
            own = scored.token_logprobs[position]
            if not own.HasField("value"):
                entries.append(None)
                continue
            best = alternatives(scored.top_logprobs, position)[:count]
            ranks = {candidate: rank for rank, (candidate, _) in enumerate(best, start=1)}
            rows = {token_id: finite(own.value), **dict(best)}
            entries.append(
                {
                    str(candidate): {
                        "logprob": value,
                        "rank": ranks.get(candidate),
                        "decoded_token": token_text(self._tokenizer, candidate),
                    }
                    for candidate, value in rows.items()
                }
            )
        return entries
