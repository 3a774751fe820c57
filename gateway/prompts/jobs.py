"""Converts a validated body and its tokenised prompts to engine requests, sampling parameters included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gateway.generation.job import PromptJob
from gateway.generation.model import ServedModel
from gateway.generation.output import OutputRules
from gateway.parsers.events import OutputPlan
from gateway.schemas.common import GenerationFields
from gateway.schemas.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, bad_request
from moebius.config.request_limits import MAX_BAD_WORD_IDS
from protos import engine_pb2

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def check_prompt(model: ServedModel, prompt_ids: list[int], param: str) -> None:
    """Raises ApiError 400 for an empty prompt, one that is too long, or ids outside the vocabulary."""
    if not prompt_ids:
        raise ApiError(400, f"'{param}' gives no tokens", param=param, code="invalid_value")
    model.check_length(len(prompt_ids), param)
    model.check_token_ids(prompt_ids, param)


def output_limit(model: ServedModel, prompt_length: int, param: str, requested: int | None) -> int:
    """Returns the most output tokens of this request, >= 1.

    Raises:
        ApiError: 400 when the prompt and the tokens asked for exceed the context.
    """
    room = model.max_context_length - prompt_length
    if requested is None:
        default = model.defaults.get("max_new_tokens")
        return max(1, min(room, int(default))) if default else max(1, room)
    if requested > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {model.max_context_length} tokens. However, you "
            f"requested {prompt_length + requested} tokens ({prompt_length} in the prompt, {requested} for "
            "the completion).",
            param=param,
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    return max(1, requested)  # the engine always generates one; 0 (echo only) drops it


def build_sampling_params(
    body: GenerationFields,
    model: ServedModel,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> engine_pb2.SamplingParams:
    """Returns the engine's parameters. Raises ApiError 400 for invalid token ids or an impossible minimum.

    Args:
        body: the validated request.
        model: gives vocabulary size and generation defaults.
        max_tokens: from `output_limit`; None: all that fit.
        logprobs: alternatives per output token; None: no logprobs.
        prompt_logprobs: alternatives per prompt token; None: none.
    """
    bias = body.token_bias()
    model.check_token_ids(sorted(bias), "logit_bias")
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        model.check_token_ids(getattr(body, name) or [], name)
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise ApiError(
            400,
            f"'min_tokens' is {body.min_tokens}, but at most {max_tokens} tokens are generated",
            param="min_tokens",
            code="invalid_value",
        )
    top_k = int(_value(body.top_k, model, "top_k", 0))
    return engine_pb2.SamplingParams(
        temperature=float(_value(body.temperature, model, "temperature", 1.0)),
        top_p=float(_value(body.top_p, model, "top_p", 1.0)),
        top_k=max(top_k, 0),
        min_p=float(_value(body.min_p, model, "min_p", 0.0)),
        repetition_penalty=float(_value(body.repetition_penalty, model, "repetition_penalty", 1.0)),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=body.ignore_eos,
        n=body.n or 1,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seed=body.seed,
        logit_bias=bias,
        allowed_token_ids=body.allowed_token_ids or [],
        bad_words=_bad_words(body.bad_words or [], model),
        logprob_token_ids=body.logprob_token_ids or [],
    )


def _bad_words(words: list[str], model: ServedModel) -> list[engine_pb2.TokenSequence]:
    """Returns the tokens of each word at a text's beginning and after a space, without duplicates.

    Raises:
        ApiError: 400; a word has no tokens, or all together have too many.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        forms = [model.tokenizer.encode(space + word.lstrip(), False) for space in ("", " ")]
        if not forms[0]:
            raise bad_request(f"'bad_words' has {word!r}, which gives no tokens", "bad_words")
        sequences.update({tuple(form): None for form in forms if form})
    longest = max(map(len, sequences), default=0)
    if len(sequences) * longest > MAX_BAD_WORD_IDS:
        raise bad_request(
            f"'bad_words' has {len(sequences)} spellings of up to {longest} tokens; at most "
            f"{MAX_BAD_WORD_IDS} tokens are allowed if all were as long as the longest",
            "bad_words",
        )
    return [engine_pb2.TokenSequence(token_ids=sequence) for sequence in sequences]


def _value(requested: float | None, model: ServedModel, name: str, fallback: float) -> Any:
    """Returns the client's value, else the model's generation default, else the API's default."""
    if requested is not None:
        return requested
    default = model.defaults.get(name)
    return fallback if default is None else default


@dataclass(frozen=True)
class JobPlan:
    """Parameters that differ between the two APIs; filled by `prepare.py`."""

    prompt_param: str  # parameter named in errors about the prompt
    limit_param: str  # parameter named in errors about the output's length
    limit: int | None  # output tokens asked for; 0: only echo; None: all that fit
    logprobs: int | None  # alternatives per output token; None: no log-probabilities
    prompt_logprobs: int | None = None  # alternatives per prompt token
    echo: bool = False
    fits_limit: bool = False  # a limit beyond the context is no error
    echoes_logprobs: bool = False
    best_of: int | None = None  # outputs generated, of which `n` are returned; None: n
    output: OutputPlan | None = None  # how outputs are read; None: everything is content
    with_images: bool = False  # the engine adds tokens to the prompt
    pooling: engine_pb2.Pooling = engine_pb2.POOLING_NONE  # of prompts that run in turns
    constraint: engine_pb2.Constraint | None = None  # that every output satisfies; None: none


def build_jobs(
    body: GenerationFields, model: ServedModel, plan: JobPlan, prompts: list[tuple[str, list[int]]]
) -> list[PromptJob]:
    """Returns one job per prompt (text, token ids), with choices numbered prompt by prompt.

    Raises:
        ApiError: 400 naming the parameter, before anything is sent to the engine.
    """
    given = body.n or 1
    made = max(given, plan.best_of or given)
    if plan.pooling == engine_pb2.POOLING_NONE:
        _check_outputs(model, len(prompts), made)
    jobs = []
    for number, (text, prompt_ids) in enumerate(prompts):
        check_prompt(model, prompt_ids, plan.prompt_param)
        max_tokens = _max_tokens(model, len(prompt_ids), plan)
        params = build_sampling_params(body, model, max_tokens, plan.logprobs, plan.prompt_logprobs)
        if made > given:
            params.n = made
            params.logprobs = plan.logprobs or 0  # needed to rank the outputs
        params.pooling = plan.pooling
        stops = body.stop_strings()
        request = engine_pb2.GenerateRequest(
            tokenized=engine_pb2.TokenizedInput(input_ids=prompt_ids),
            sampling_params=params,
            # Streamed, since stop strings and the end of the only call are found while the text grows.
            stream=bool(body.stream or stops or (plan.output is not None and plan.output.max_calls)),
            priority=max(INT32_MIN, min(body.priority, INT32_MAX)),
            cache_salt=body.cache_salt or "",
            keep_prefix_s=body.kept_s,
            constraint=plan.constraint,
        )
        rules = replace(_rules(body, model, plan, text), plan=plan.output)
        job = PromptJob(request, rules, first_index=number * made, stream_interval=body.stream_interval or 1)
        job.kept_outputs = given if made > given else 0
        jobs.append(job)
    return jobs


def _check_outputs(model: ServedModel, prompts: int, n: int) -> None:
    """Raises ApiError 400 for more outputs than the engine's queue holds: waiting would not help."""
    most = model.max_waiting_outputs
    if most and prompts * n > most:
        asked = f"'n' asks for {n} outputs" + (f" of each of {prompts} prompts" if prompts > 1 else "")
        raise bad_request(f"{asked}; at most {most} are queued (max_waiting_requests)", "n")


def _max_tokens(model: ServedModel, prompt_length: int, plan: JobPlan) -> int | None:
    """Returns the most output tokens; None: all that fit, which with images only the engine knows."""
    if plan.with_images and plan.limit is None:
        return None
    limit, room = plan.limit, max(1, model.max_context_length - prompt_length)
    if plan.fits_limit and limit is not None and limit >= room:
        if plan.with_images:
            return None
        limit = room
    return output_limit(model, prompt_length, plan.limit_param, limit)


def _rules(body: GenerationFields, model: ServedModel, plan: JobPlan, text: str) -> OutputRules:
    """Returns the rules by which this request's tokens become text; `text` is echoed if the plan says so."""
    ends = frozenset() if body.ignore_eos else model.eos_token_ids
    return OutputRules(
        stop_strings=body.stop_strings(),
        include_stop=body.include_stop_str_in_output,
        stop_token_ids=ends | frozenset(body.stop_token_ids or ()),
        eos_token_ids=model.eos_token_ids,
        min_tokens=body.min_tokens,
        skip_special_tokens=body.skip_special_tokens,
        prompt_text=text if plan.echo else None,
        echo_only=plan.limit == 0,
        echoes_logprobs=plan.echoes_logprobs,
        detokenize=body.detokenize,
    )
