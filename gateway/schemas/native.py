"""The bodies of llama-server's own completions and of SGLang's own generation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gateway.schemas.common import INT64_MAX, INT64_MIN, MAX_LABEL_CHARACTERS, StrictModel

_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_NO_EFFECT = "No effect"


class LlamaSampling(StrictModel):
    """Sampling options of llama-server, which Ollama has, too."""

    temperature: float | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=-1)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX, description="-1: any")
    stop: str | list[str] | None = None


class LlamaFields(LlamaSampling):
    """Fields of llama-server's `/completion` and `/infill`."""

    model: str | None = Field(None, max_length=MAX_LABEL_CHARACTERS)
    n_predict: int | None = Field(None, ge=-2, le=2**31, description="Most output tokens; below 0: no limit")
    max_tokens: int | None = Field(None, ge=-1, le=2**31, description="As n_predict")
    ignore_eos: bool | None = None
    logit_bias: Any = Field(None, description="[[id, bias], ...], or an object; false: never")
    n_probs: int | None = Field(None, ge=0, le=20, description="Alternatives per token")
    grammar: str | None = Field(None, description="GBNF")
    json_schema: dict[str, Any] | None = None
    stream: bool | None = None
    cache_prompt: Any = Field(None, description=f"{_NO_EFFECT}: prefixes are always cached")
    id_slot: int | None = Field(
        None, ge=-1, le=2**31, description="Slot whose context can be saved afterwards; -1: 0"
    )
    return_tokens: bool | None = Field(None, description=f"{_NO_EFFECT}: they are always returned")
    samplers: Any = Field(None, description=_NO_EFFECT)
    timings_per_token: Any = Field(None, description=_NO_EFFECT)


class LlamaCompletionRequest(LlamaFields):
    """A prompt to continue."""

    prompt: str | _Ids | Annotated[list[str | _Ids], Field(min_length=1)]


class InfillRequest(LlamaFields):
    """A text to write between two others; for models with tokens to fill in the middle."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = Field("", description="Text after input_prefix")
    input_extra: list[dict[str, Any]] | None = Field(None, description="Files before it: filename and text")


class SglangSampling(StrictModel):
    """SGLang's sampling parameters."""

    place = "sampling_params."
    max_new_tokens: int | None = Field(
        128, ge=0, le=2**31, description="0: only the prompt is computed; null: all that fit"
    )
    min_new_tokens: int | None = Field(None, ge=0, le=2**31)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    sampling_seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Any = Field(None, description=_NO_EFFECT)
    no_stop_trim: bool | None = None
    n: int | None = Field(None, ge=1)
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    logit_bias: dict[str, float] | None = None


class SglangGenerateRequest(StrictModel):
    """SGLang's generation; exactly one of `text` and `input_ids`."""

    text: str | Annotated[list[str], Field(min_length=1)] | None = None
    input_ids: _Ids | Annotated[list[_Ids], Field(min_length=1)] | None = None
    sampling_params: SglangSampling = SglangSampling.model_validate({})
    stream: bool | None = None
    rid: str | None = Field(None, min_length=1, max_length=128, description="For /abort_request")
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(
        None, ge=-1, le=2**31, description="First prompt token with a log-probability; -1 or unset: none has"
    )
    top_logprobs_num: int | None = Field(None, ge=0, le=20)
    return_text_in_logprobs: bool | None = None
    priority: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)


class SlotFile(StrictModel):
    """Which file a slot's context is saved to, or restored from."""

    filename: str | None = Field(None, description="Needed, but for erasing")


class AbortRequest(StrictModel):
    """Which of the client's own requests ends."""

    rid: str = Field(min_length=1, max_length=128)
