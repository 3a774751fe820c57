"""llama-server's `/completion` and `/infill`, and SGLang's `/generate`: translations and formats."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.apis.formats import Output, ResponseFormat, Usage
from gateway.apis.translation import Context, Translation, llama_sampling, without_none
from gateway.generation.job import PromptJob
from gateway.generation.output import prompt_token_logprobs
from gateway.parsers.events import Finish, ParsedDelta, TokenLogprob
from gateway.schemas.errors import ApiError, bad_request
from gateway.schemas.native import InfillRequest, LlamaCompletionRequest, LlamaFields, SglangGenerateRequest
from gateway.text.tokenizer import Tokenizer
from gateway.transport.streaming import DONE, event

_UNLIMITED = 2**31  # output tokens, reduced to what fits in the context
_NEVER = -100.0  # added to the logit of a token that is not to be drawn
_LLAMA_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
_SGLANG_NAMES = {
    "prompt": "text",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    **{name: f"sampling_params.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "stop", "n")},
}


@dataclass(frozen=True)
class NativeReply:
    """What an answer is made from besides outputs; filled by the translations."""

    prompts: tuple[str, ...] = ()  # that llama-server's answers repeat
    rid: str = ""  # SGLang's id of the request
    is_list: bool = False  # whether the answer is a list, of one output or more
    is_scored: bool = False  # whether log-probabilities were asked for
    has_texts: bool = False  # whether log-probabilities have the tokens' texts
    num_top: int = 0  # alternatives of each token
    slot: int = 0  # of llama-server, whose context the prompt and the output become
    num_outputs: int = 1  # of each prompt
    first_scored: int | None = None  # first prompt token with a log-probability; None: none has


def translate_completion(body: LlamaCompletionRequest, context: Context) -> Translation:
    """Returns the text completion for a prompt, or for several.

    Raises:
        ApiError: 400; several are to be streamed, or are some texts and some ids.
    """
    given = body.prompt
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    if is_list and body.stream:
        raise bad_request("several prompts are answered together: 'stream' needs one prompt", "prompt")
    if is_list and len({type(prompt) for prompt in given}) > 1:
        raise bad_request("'prompt' has texts or lists of token ids, not both", "prompt")
    texts = [given] if isinstance(given, str) else [one if isinstance(one, str) else "" for one in given]
    prompts = tuple(texts) if is_list else (texts[0],)
    reply = NativeReply(prompts, is_list=is_list, slot=max(0, body.id_slot or 0))
    request = {**_llama_fields(body), "prompt": given}
    return Translation(without_none(request), _LLAMA_NAMES, reply, fits_limit=True, is_text=True)


def translate_infill(body: InfillRequest, context: Context) -> Translation:
    """Returns the text completion that fills in the middle; further files come before it.

    Raises:
        ApiError: 400; a file is no object with a text.
    """
    extra = body.input_extra or []
    if not all(isinstance(file.get("text"), str) for file in extra):
        raise bad_request("'input_extra' has objects with 'filename' and 'text'", "input_extra")
    files = "".join(f"{file.get('filename', '')}\n{file['text']}\n" for file in extra)
    prompt = files + body.input_prefix + body.prompt
    request = {**_llama_fields(body), "prompt": prompt, "suffix": body.input_suffix or "\n"}
    return Translation(
        without_none(request),
        _LLAMA_NAMES,
        NativeReply((prompt,), slot=max(0, body.id_slot or 0)),
        fits_limit=True,
        is_text=True,
    )


def _llama_fields(body: LlamaFields) -> dict[str, Any]:
    limit = body.n_predict if body.n_predict is not None else body.max_tokens
    structured = {"grammar": body.grammar, "json": body.json_schema}
    return {
        "model": body.model,
        "max_tokens": _UNLIMITED if limit is None or limit < 0 else limit,
        **llama_sampling(body),
        "ignore_eos": body.ignore_eos,
        "logit_bias": _bias(body.logit_bias),
        "logprobs": body.n_probs or None,
        "structured_outputs": without_none(structured) or None,
        "stream": body.stream,
        "return_token_ids": True,
    }


def _bias(given: Any) -> dict[str, float] | None:
    """Returns OpenAI's form. Raises ApiError 400 for another than llama-server's two."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    try:
        return {
            str(int(token)): _NEVER if bias is False else float(bias) for token, bias in pairs or ()
        } or None
    except (TypeError, ValueError):
        raise bad_request("'logit_bias' is a list of [token id, bias], or an object", "logit_bias") from None


def translate_generate(body: SglangGenerateRequest, context: Context) -> Translation:
    """Returns the text completion for SGLang's generation.

    Raises:
        ApiError: 400; the prompt is given twice or not at all, or structure in several forms.
    """
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("send exactly one of 'text' and 'input_ids'", "text")
    prompt: Any = body.text if body.text is not None else body.input_ids
    sampling = body.sampling_params
    is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
    structured = {"json": sampling.json_schema, "regex": sampling.regex, "grammar": sampling.ebnf}
    num_top, start = body.top_logprobs_num or 0, body.logprob_start_len
    is_scored = bool(body.return_logprob) and start is not None and start >= 0
    has_output = sampling.max_new_tokens != 0
    request = {
        "prompt": prompt,
        "echo": None if has_output else True,
        "max_tokens": _UNLIMITED if sampling.max_new_tokens is None else sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        **{
            name: getattr(sampling, name)
            for name in (
                *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
                *("repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "n"),
                "logit_bias",
            )
        },
        "seed": sampling.sampling_seed,
        "include_stop_str_in_output": sampling.no_stop_trim,
        "structured_outputs": without_none(structured) or None,
        "logprobs": num_top if body.return_logprob and has_output else None,
        "prompt_logprobs": num_top if is_scored else None,
        "stream": body.stream,
        "priority": body.priority,
        "return_token_ids": True,
    }
    reply = NativeReply(
        rid=body.rid or uuid.uuid4().hex,
        is_list=is_batch or (sampling.n or 1) > 1,
        is_scored=bool(body.return_logprob),
        has_texts=bool(body.return_text_in_logprobs),
        num_top=num_top,
        num_outputs=sampling.n or 1,
        first_scored=start if is_scored else None,
    )
    return Translation(without_none(request), _SGLANG_NAMES, reply, fits_limit=True, is_text=True)


class LlamaFormat(ResponseFormat):
    """Builds llama-server's answer: one object, or events of which the last has the counts."""

    operation = "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: int | None, reply: NativeReply) -> None:
        """`logprobs`: alternatives of each token; None: no log-probabilities."""
        self.id = f"llama-{uuid.uuid4().hex}"
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._reply = reply
        self._finish: Finish | None = None

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any] | list[dict[str, Any]]:
        made = []
        for index, output in enumerate(outputs):
            self._finish = output.finish
            own = usage if len(outputs) == 1 else replace(usage, completion_tokens=len(output.token_ids))
            piece = self._piece(output.text, output.token_ids, output.logprobs)
            made.append({**piece, **self._ending(own, self._reply.prompts[index]), "index": index})
        return made if self._reply.is_list else made[0]

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        self._finish = delta.finish or self._finish
        if not delta.content and not delta.token_ids:
            return b""
        return event({**self._piece(delta.content, delta.token_ids, delta.logprobs), "stop": False})

    def stream_end(self, usage: Usage) -> bytes:
        return event({**self._piece("", (), ()), **self._ending(usage, self._reply.prompts[0])})

    def stream_failure(self, error: ApiError) -> bytes:
        failure = {"code": error.status, "message": error.message, "type": error.code or "server_error"}
        return event({"error": failure})

    def _piece(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        piece: dict[str, Any] = {"index": 0, "content": text, "tokens": list(token_ids)}
        if self._logprobs is not None and logprobs:
            piece["completion_probabilities"] = [self._scored(token) for token in logprobs]
        return piece

    def _scored(self, token: TokenLogprob) -> dict[str, Any]:
        def named(token_id: int, logprob: float | None) -> dict[str, Any]:
            text = self._tokenizer.piece(token_id)
            return {"id": token_id, "token": text, "bytes": list(text.encode()), "logprob": logprob}

        top = [named(token_id, logprob) for token_id, logprob in token.top]
        return {**named(token.token_id, token.logprob), "top_logprobs": top}

    def _ending(self, usage: Usage, prompt: str) -> dict[str, Any]:
        reason = self._finish.reason if self._finish is not None else "stop"
        found = self._finish.stop_reason if self._finish is not None else None
        word = found if isinstance(found, str) else ""
        decode_s = max(usage.total_s - usage.prompt_s, 0.0)
        return {
            "stop": True,
            "id_slot": self._reply.slot,
            "model": self._model,
            "prompt": prompt,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "stop_type": "limit" if reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "generation_settings": {},
            "timings": {
                **_timings("prompt", usage.prompt_tokens - usage.cached_tokens, usage.prompt_s),
                **_timings("predicted", usage.completion_tokens, decode_s),
            },
        }


def _timings(name: str, count: int, seconds: float) -> dict[str, float]:
    """Returns llama-server's figures of a phase: its tokens, and milliseconds."""
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


class SglangFormat(ResponseFormat):
    """Builds SGLang's answer: an object for each output, in streams with all of its text so far."""

    operation = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, reply: NativeReply, engine_id: str, jobs: Sequence[PromptJob]
    ) -> None:
        """`engine_id`: by which `/abort_request` names the request to the engine; `jobs`: of all prompts."""
        self.id = reply.rid
        self.engine_id = engine_id
        self._tokenizer = tokenizer
        self._reply = reply
        self._jobs = jobs
        self._outputs: dict[int, Output] = {}

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any] | list[dict[str, Any]]:
        made = [self._object(index, output, usage) for index, output in enumerate(outputs)]
        return made if self._reply.is_list else made[0]

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        output = self._outputs.setdefault(delta.index, Output())
        output.add(delta)
        index = {"index": delta.index} if self._reply.is_list else {}
        return event({**self._object(delta.index, output, usage()), **index})

    def stream_end(self, usage: Usage) -> bytes:
        return DONE

    def stream_failure(self, error: ApiError) -> bytes:
        return event({"error": {"message": error.message, "code": error.status}}) + DONE

    def _object(self, index: int, output: Output, usage: Usage) -> dict[str, Any]:
        job, token_ids = self._jobs[index // self._reply.num_outputs], output.token_ids
        is_prompt_only = job.rules.echo_only
        meta: dict[str, Any] = {
            "id": self.id,
            "finish_reason": None if output.finish is None else _reason(output.finish, len(token_ids)),
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": len(token_ids),
            "cached_tokens": job.cached_tokens,
            "e2e_latency": usage.total_s,
        }
        if self._reply.is_scored:
            meta |= self._token_logprobs("output", output.logprobs)
            meta |= self._token_logprobs("input", self._prompt_logprobs(job))
        # What is echoed of a prompt without an output is no output.
        text = "" if is_prompt_only else output.text
        return {"text": text, "output_ids": token_ids, "meta_info": meta}

    def _prompt_logprobs(self, job: PromptJob) -> list[TokenLogprob]:
        first, found = self._reply.first_scored, job.input_logprobs
        if first is None or found is None:
            return []
        return prompt_token_logprobs(found)[first:]

    def _token_logprobs(self, of: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns SGLang's lists of the log-probabilities of the input, or of the output."""
        own = {f"{of}_token_logprobs": [self._scored(token.logprob, token.token_id) for token in tokens]}
        if not self._reply.num_top:
            return own
        top = [[self._scored(value, token_id) for token_id, value in token.top] or None for token in tokens]
        return {**own, f"{of}_top_logprobs": top}

    def _scored(self, logprob: float | None, token_id: int) -> tuple[float | None, int, str | None]:
        return logprob, token_id, self._tokenizer.piece(token_id) if self._reply.has_texts else None


def _reason(finish: Finish, tokens: int) -> dict[str, Any]:
    if finish.reason == "length":
        return {"type": "length", "length": tokens}
    if finish.reason == "abort":
        return {"type": "abort", "message": "Aborted"}
    return {"type": "stop", "matched": finish.stop_reason}
