"""From a validated body and its tokenised prompts to engine requests."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import bad_request
from gateway.generation import PromptJob
from gateway.model import ServedModel
from gateway.output import OutputRules
from gateway.sampling import build_sampling_params, check_prompt, output_limit
from gateway.schemas.common import GenerationFields
from protos import engine_pb2


@dataclass(frozen=True)
class JobPlan:
    """What the two APIs ask for differently; filled by `prepare.py`."""

    prompt_param: str  # parameter named in errors about the prompt
    limit_param: str  # parameter named in errors about the output's length
    limit: int | None  # output tokens asked for; 0: only echo; None: as many as fit
    logprobs: int | None  # alternatives per output token; None: no log-probabilities
    prompt_logprobs: int | None = None  # alternatives per prompt token
    echo: bool = False
    with_images: bool = False  # the engine puts more tokens into the prompt


def build_jobs(
    body: GenerationFields, model: ServedModel, plan: JobPlan, prompts: list[tuple[str, list[int]]]
) -> list[PromptJob]:
    """One job per prompt (text, token ids), with choices numbered prompt by prompt.

    Raises:
        ApiError: 400 naming the parameter, before anything is sent to the engine.
    """
    _check_outputs(model, len(prompts), body.n or 1)
    jobs = []
    for number, (text, prompt_ids) in enumerate(prompts):
        check_prompt(model, prompt_ids, plan.prompt_param)
        max_tokens = _max_tokens(model, len(prompt_ids), plan)
        params = build_sampling_params(body, model, max_tokens, plan.logprobs, plan.prompt_logprobs)
        stops = body.stop_strings()
        request = engine_pb2.GenerateRequest(
            tokenized=engine_pb2.TokenizedInput(input_ids=prompt_ids),
            sampling_params=params,
            stream=bool(body.stream or stops),  # stop strings are found while the text grows
            priority=body.priority,
            cache_salt=body.cache_salt or "",
        )
        rules = _rules(body, model, text if plan.echo else None, plan.limit == 0)
        jobs.append(PromptJob(request, rules, first_index=number * (body.n or 1)))
    return jobs


def _check_outputs(model: ServedModel, prompts: int, n: int) -> None:
    """ApiError 400 for more outputs than the engine ever queues: waiting would not help."""
    most = model.max_waiting_outputs
    if most and prompts * n > most:
        asked = f"'n' asks for {n} outputs" + (f" of each of {prompts} prompts" if prompts > 1 else "")
        raise bad_request(f"{asked}; at most {most} are queued (max_waiting_requests)", "n")


def _max_tokens(model: ServedModel, prompt_length: int, plan: JobPlan) -> int | None:
    """Most output tokens; None: as many as fit, which only the engine knows of a prompt with images."""
    if plan.with_images and plan.limit is None:
        return None
    return output_limit(model, prompt_length, plan.limit_param, plan.limit)


def _rules(body: GenerationFields, model: ServedModel, echo: str | None, echo_only: bool) -> OutputRules:
    """How the tokens of this request become text."""
    ends = frozenset() if body.ignore_eos else model.eos_token_ids
    return OutputRules(
        stop_strings=body.stop_strings(),
        include_stop=body.include_stop_str_in_output,
        stop_token_ids=ends | frozenset(body.stop_token_ids or ()),
        eos_token_ids=model.eos_token_ids,
        min_tokens=body.min_tokens,
        skip_special_tokens=body.skip_special_tokens,
        prompt_text=echo,
        echo_only=echo_only,
    )
