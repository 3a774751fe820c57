"""From a GenerateRequest to engine requests; every refusal names the field and what is allowed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpu_service.core.constraint import ConstraintCompiler, OutputConstraint
from gpu_service.core.images import ImageError, PreparedImage, VisionPrompt, place_images
from gpu_service.core.request import Pooling, Request, SamplingParams
from gpu_service.ops.sampling import derive_seed
from gpu_service.vision.processor import ImagePreparer
from moebius.config.request_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORD_SEQUENCES,
    MAX_KEEP_PREFIX_S,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_OUTPUTS,
    MAX_STOP_TOKEN_IDS,
    MAX_THOUGHT_MARKER_IDS,
)
from moebius.grammar.compile import GrammarError
from protos import engine_pb2 as pb


class InvalidField(ValueError):
    """A field of the request is out of range, or for another reason cannot be used."""

    def __init__(self, field: str, value: object, allowed: str, message: str = "") -> None:
        super().__init__(message or f"{field}: {value!r} is not allowed; {allowed}")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Facts of the served model that requests are checked against; filled once by `main`."""

    vocab_size: int
    context_limit: int
    random_seed: int = 0


def make_requests(
    message: pb.GenerateRequest,
    bounds: Bounds,
    preparer: ImagePreparer | None = None,
    compiler: ConstraintCompiler | None = None,
) -> list[Request]:
    """One engine request per output; images and constraints take a while. Raises InvalidField.

    `preparer` None: the model is text-only; `compiler` None: it has no tokenizer.
    """
    if not 1 <= len(message.request_id) <= 256:
        raise InvalidField("request_id", message.request_id[:300], "1 to 256 characters")
    if len(message.fairness_id) > 256:
        raise InvalidField("fairness_id", message.fairness_id[:300], "at most 256 characters")
    if not 0 <= message.keep_prefix_s <= MAX_KEEP_PREFIX_S:  # and no NaN
        raise InvalidField("keep_prefix_s", message.keep_prefix_s, f"0 to {MAX_KEEP_PREFIX_S}")
    prompt, vision = _prompt(message, preparer)
    if not 1 <= len(prompt) < bounds.context_limit:
        raise InvalidField(
            "tokenized.input_ids", f"{len(prompt)} tokens", f"1 to {bounds.context_limit - 1} tokens"
        )
    _check_ids("tokenized.input_ids", prompt, bounds)
    sampling = message.sampling_params
    _check_ranges(sampling, bounds)
    # What is long in them (prompt, bias, stop tokens) exists once, however many outputs are asked for.
    params = _params(sampling, len(prompt), bounds)
    arrived_s = time.monotonic()
    if params.prompt_logprobs is not None and vision is not None and vision.sees_ahead:
        raise InvalidField(
            "sampling_params.prompt_logprobs", params.prompt_logprobs, "absent with images of this model"
        )
    return [
        Request(
            request_id=message.request_id,
            prompt_token_ids=prompt,
            params=replace(params, seed=_seed(message, index, bounds)),
            index=index,
            priority=message.priority,
            cache_namespace=message.cache_salt,
            fairness_id=message.fairness_id,
            keep_prefix_s=message.keep_prefix_s,
            arrived_s=arrived_s,
            vision=vision,
            constraint=constraint,
        )
        for index, constraint in enumerate(_constraints(message, sampling.n or 1, bounds, compiler))
    ]


def _constraints(
    message: pb.GenerateRequest, count: int, bounds: Bounds, compiler: ConstraintCompiler | None
) -> Sequence[OutputConstraint | None]:
    """Returns one for each output."""
    if not message.HasField("constraint"):
        return [None] * count
    constraint = message.constraint
    if compiler is None:
        raise InvalidField("constraint", "a constraint", "this model has no tokenizer: leave it unset")
    after, forced = list(constraint.after_token_ids), list(constraint.forced_token_ids)
    has_limit = constraint.HasField("max_reasoning_tokens")
    if not after and (constraint.start_token_ids or forced or has_limit):
        raise InvalidField(
            "constraint.after_token_ids", [], "what ends the thought, for all that is about it"
        )
    if forced and forced[-len(after) :] != after:
        raise InvalidField("constraint.forced_token_ids", forced, f"they end with after_token_ids, {after}")
    for name in ("after_token_ids", "start_token_ids", "forced_token_ids"):
        token_ids = getattr(constraint, name)
        if len(token_ids) > MAX_THOUGHT_MARKER_IDS:
            raise InvalidField(
                f"constraint.{name}", f"{len(token_ids)} ids", f"at most {MAX_THOUGHT_MARKER_IDS}"
            )
        _check_ids(f"constraint.{name}", token_ids, bounds)
    try:
        return compiler.make(constraint, count)
    except GrammarError as error:
        kind = constraint.WhichOneof("kind")
        said = f"the constraint of the output ({kind}) cannot be enforced: {error}"
        raise InvalidField(f"constraint.{kind}", None, "", said) from error


def _prompt(
    message: pb.GenerateRequest, preparer: ImagePreparer | None
) -> tuple[list[int], VisionPrompt | None]:
    """Returns the prompt's tokens, each image as many as it becomes."""
    sent = list(message.tokenized.input_ids)
    if not message.images:
        return sent, None
    if preparer is None:
        raise InvalidField("images", f"{len(message.images)} images", "this model takes text only")
    salt = message.cache_salt
    images = [_image(index, item, preparer, salt) for index, item in enumerate(message.images)]
    try:
        return place_images(sent, images, preparer.layout)
    except ImageError as error:
        raise InvalidField("images", f"{len(images)} images", str(error)) from error


def _image(index: int, item: pb.ImageInput, preparer: ImagePreparer, cache_salt: str) -> PreparedImage:
    if item.detail not in pb.ImageDetail.values():
        raise InvalidField(f"images[{index}].detail", item.detail, ", ".join(pb.ImageDetail.keys()))
    try:
        low_detail = item.detail == pb.IMAGE_DETAIL_LOW
        return preparer.prepare(item.data, low_detail=low_detail, cache_salt=cache_salt)
    except ImageError as error:
        raise InvalidField(f"images[{index}]", f"{len(item.data)} bytes", str(error)) from error


def _seed(message: pb.GenerateRequest, index: int, bounds: Bounds) -> int:
    """Outputs are independent draws; a request's own seed makes all of them repeatable."""
    sampling = message.sampling_params
    if sampling.HasField("seed"):
        return derive_seed(sampling.seed, index)
    return derive_seed(bounds.random_seed, message.request_id, index)


def _params(sampling: pb.SamplingParams, prompt_len: int, bounds: Bounds) -> SamplingParams:
    room = bounds.context_limit - prompt_len
    if sampling.pooling not in {int(one) for one in Pooling}:
        raise InvalidField("sampling_params.pooling", sampling.pooling, "0 (none), 1 (last) or 2 (mean)")
    if sampling.pooling and sampling.n > 1:
        raise InvalidField("sampling_params.n", sampling.n, "1 with pooling")
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else room
    max_tokens = 1 if sampling.pooling else max_tokens
    if not 1 <= max_tokens <= room:
        raise InvalidField(
            "sampling_params.max_tokens",
            max_tokens,
            f"1 to {room} with {prompt_len} prompt tokens (context length {bounds.context_limit})",
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidField(
            "sampling_params.min_tokens", sampling.min_tokens, f"0 to {max_tokens} (max_tokens)"
        )
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sorted(set(sampling.allowed_token_ids))),
        bad_words=tuple(tuple(sequence.token_ids) for sequence in sampling.bad_words),
        logprob_token_ids=tuple(sampling.logprob_token_ids),
        pooling=Pooling(sampling.pooling),
    )


def _check_ranges(sampling: pb.SamplingParams, bounds: Bounds) -> None:
    infinity = math.inf
    ranges: list[tuple[str, float, float, float, str]] = [
        ("temperature", sampling.temperature, 0.0, 1e6, "0 (greedy) or more"),
        ("top_p", sampling.top_p, 0.0, 1.0, "more than 0, at most 1 (0 or unset means 1)"),
        ("min_p", sampling.min_p, 0.0, 1.0, "0 to 1"),
        ("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0, "-2 to 2"),
        ("presence_penalty", sampling.presence_penalty, -2.0, 2.0, "-2 to 2"),
        ("repetition_penalty", sampling.repetition_penalty, 0.0, 1e6, "more than 0 (0 or unset means 1)"),
        ("n", sampling.n, 0, MAX_OUTPUTS, f"1 to {MAX_OUTPUTS}"),
        ("logprobs", sampling.logprobs, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        ("prompt_logprobs", sampling.prompt_logprobs, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
    ]
    for name, value, low, high, allowed in ranges:
        # Written so that NaN, for which every comparison is false, is refused too.
        if not (low <= value <= high and abs(value) < infinity):
            raise InvalidField(f"sampling_params.{name}", value, allowed)
    _check_count("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS)
    _check_ids("sampling_params.stop_token_ids", sampling.stop_token_ids, bounds)
    _check_ids("sampling_params.logit_bias", sampling.logit_bias, bounds)
    _check_token_lists(sampling, bounds)
    for value in sampling.logit_bias.values():
        if not -100.0 <= value <= 100.0:
            raise InvalidField("sampling_params.logit_bias", value, "-100 to 100")


def _check_token_lists(sampling: pb.SamplingParams, bounds: Bounds) -> None:
    for name, most in (
        ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
        ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS),
    ):
        token_ids = getattr(sampling, name)
        _check_count(name, len(token_ids), most)
        _check_ids(f"sampling_params.{name}", token_ids, bounds)
    if sampling.logprob_token_ids and not sampling.HasField("logprobs"):
        raise InvalidField(
            "sampling_params.logprob_token_ids",
            f"{len(sampling.logprob_token_ids)} ids",
            "they need 'logprobs' to be set",
        )
    words = sampling.bad_words
    _check_count("bad_words", len(words), MAX_BAD_WORD_SEQUENCES)
    longest = max((len(sequence.token_ids) for sequence in words), default=0)
    if len(words) * longest > MAX_BAD_WORD_IDS or any(not sequence.token_ids for sequence in words):
        raise InvalidField(
            "sampling_params.bad_words",
            f"{len(words)} sequences of up to {longest} ids",
            f"1 or more ids each, and at most {MAX_BAD_WORD_IDS} if all were as long as the longest",
        )
    for sequence in words:
        _check_ids("sampling_params.bad_words", sequence.token_ids, bounds)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidField(f"sampling_params.{name}", f"{count} entries", f"at most {most}")


def _check_ids(field: str, token_ids: Iterable[int], bounds: Bounds) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < bounds.vocab_size:
            raise InvalidField(field, token_id, f"token ids in [0, {bounds.vocab_size})")
