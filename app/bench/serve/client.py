"""One streamed request to an OpenAI-compatible server, with the times of what arrives."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from app.bench.serve.dataset import PromptRequest, TokenScale, words
from app.client import CONNECT_TIMEOUT_S, ClientTls
from moebius.errors import UserError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
# Words of the two requests that tell how the server counts.
_FEW, _MANY = 32, 160
_LONGEST_ERROR = 120


@dataclass
class Sample:
    """One request; filled by `Endpoint.ask`. Times are those of `time.perf_counter`, others seconds."""

    begin: float = 0.0
    # Unset for a request that failed before its first token.
    ttft: float | None = None
    # Between two events with text; an event may carry several tokens.
    itl: list[float] = field(default_factory=list)
    end: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    # What went wrong, in a form in which equal causes are equal; empty: nothing.
    error: str = ""
    # How much later than planned it was sent.
    late: float = 0.0

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.end - self.begin

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)


@dataclass(frozen=True)
class EndpointOptions:
    """Filled by the command line."""

    url: str
    endpoint: str = ENDPOINTS[0]
    model: str = ""  # Empty: the first one that the server lists.
    api_key: str = ""
    tls: ClientTls | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    # Further keys of every request's body.
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0  # of silence

    def check(self) -> None:
        """Raises UserError naming the option."""
        if self.endpoint not in ENDPOINTS:
            allowed = ", ".join(ENDPOINTS)
            raise UserError(f"--endpoint: {self.endpoint!r} is not allowed; allowed: {allowed}")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(
                f"URL: {self.url!r} is not allowed; allowed: http://HOST:PORT or https://HOST:PORT"
            )


class Endpoint:
    """Connections to one server; use in one event loop, as a context manager."""

    def __init__(self, options: EndpointOptions, model: str) -> None:
        """Raises UserError for certificates that cannot be used."""
        self._options, self._model = options, model
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=options.url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(options.timeout_s, connect=max(CONNECT_TIMEOUT_S, options.timeout_s / 10)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            verify=True if options.tls is None else options.tls.context(),
        )

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def body(self, request: PromptRequest) -> dict[str, Any]:
        """Returns what is posted."""
        chat = self._options.endpoint == ENDPOINTS[0]
        prompt = (
            {"messages": [{"role": "user", "content": request.prompt}]}
            if chat
            else {"prompt": request.prompt}
        )
        return {
            "model": self._model,
            **prompt,
            "max_tokens": request.output_len,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self._options.ignore_eos else {}),
            **self._options.extra_body,
        }

    async def ask(self, request: PromptRequest, planned: float | None = None) -> Sample:
        """Sends it and waits for its end; what goes wrong is in the sample, never raised."""
        sample = Sample(begin=time.perf_counter())
        sample.late = 0.0 if planned is None else sample.begin - planned
        try:
            await self._stream(self.body(request), sample)
        except httpx.TimeoutException as error:
            sample.error = f"{type(error).__name__}: nothing for {self._options.timeout_s:g} s"
        except httpx.HTTPError as error:
            sample.error = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        sample.end = sample.end or time.perf_counter()
        return sample

    async def _stream(self, body: dict[str, Any], sample: Sample) -> None:
        events, counted, ended, last = 0, None, False, sample.begin
        async with self._http.stream("POST", self._options.endpoint, json=body) as response:
            if response.status_code != 200:
                sample.error = _refusal(response.status_code, await response.aread())
                return
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                text = line[5:].strip()
                if text == "[DONE]":
                    ended = True
                    continue
                event = json.loads(text)
                if "error" in event:
                    sample.error = f"in the stream: {_message(event)}"[:_LONGEST_ERROR]
                    return
                usage = event.get("usage") or {}
                counted = usage.get("completion_tokens", counted)
                sample.input_tokens = usage.get("prompt_tokens", sample.input_tokens)
                has_text, finished = _look(event)
                ended = ended or finished
                if not has_text:
                    continue
                now = time.perf_counter()
                if events:
                    sample.itl.append(now - last)
                else:
                    sample.ttft = now - sample.begin
                events += 1
                last = sample.end = now
        sample.output_tokens = events if counted is None else counted
        if not ended:
            sample.error = "the stream broke off"
        elif sample.ttft is None:
            sample.error = "the answer had no text"


def _look(event: dict[str, Any]) -> tuple[bool, bool]:
    """Returns whether the event brings output of any kind, and whether it says that the output is
    complete.
    """
    has_text = finished = False
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        kinds = ("content", "reasoning_content", "reasoning", "tool_calls")
        has_text = has_text or bool(choice.get("text")) or any(delta.get(kind) for kind in kinds)
        finished = finished or choice.get("finish_reason") is not None
    return has_text, finished


def _message(document: Any) -> str:
    error = document.get("error", document) if isinstance(document, dict) else document
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _refusal(status: int, content: bytes) -> str:
    try:
        message = _message(json.loads(content))
    except ValueError:
        message = content.decode(errors="replace")
    return f"HTTP {status}: {message}"[:_LONGEST_ERROR]


async def measure_scale(endpoint: Endpoint) -> TokenScale:
    """Asks twice. Raises UserError with what the server said, or when it reports no usage."""
    counts = []
    for count in (_FEW, _MANY):
        sample = await endpoint.ask(PromptRequest(words(np.random.default_rng(count), count), 2))
        if sample.error:
            raise UserError(f"the first request failed: {sample.error}")
        if not sample.input_tokens:
            raise UserError("the server reports no usage.prompt_tokens; lengths of prompts cannot be set")
        counts.append(sample.input_tokens)
    per_word = max((counts[1] - counts[0]) / (_MANY - _FEW), 0.1)
    return TokenScale(per_word, max(0.0, counts[0] - _FEW * per_word))
