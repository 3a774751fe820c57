"""Requests before readiness: whatever a library compiles or loads at first use is there afterwards."""

from __future__ import annotations

import threading

import torch

from gpu_service.assembly.kv_tiers import OPEN_TIERS
from gpu_service.core.interface import Emission
from gpu_service.core.request import Request, SamplingParams
from gpu_service.engine.engine import Engine
from moebius.errors import UserError
from moebius.process.progress import phase

# Longer prompts use the kernels of this one; with experts on a CPU they would only cost seconds.
_LONGEST_PROMPT = 1024
_SHORT_PROMPT = 4
_MAX_TOKENS = 3


def warm_up_tokens(device: torch.device, max_num_batched_tokens: int, context_limit: int) -> int:
    """Returns the length of the longer prompt: a large chunk on a GPU; a CPU has nothing to compile."""
    wanted = min(max_num_batched_tokens, _LONGEST_PROMPT) if device.type == "cuda" else _SHORT_PROMPT
    return max(1, min(wanted, context_limit - _MAX_TOKENS))


def warm_up_requests(vocab_size: int, prompt_tokens: int) -> list[Request]:
    """One greedy, one that asks the sampler for all it has; together mixed prefills, then decode steps."""
    short = min(_SHORT_PROMPT, prompt_tokens)
    everything = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        presence_penalty=0.1,
        min_tokens=1,
        logprobs=1,
        logit_bias=((1 % vocab_size, 0.5),),
        max_tokens=_MAX_TOKENS,
        ignore_eos=True,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
    plain = SamplingParams(temperature=1.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
    return [
        _request(0, short, vocab_size, greedy),
        _request(1, prompt_tokens, vocab_size, everything),
        _request(2, short, vocab_size, plain),
    ]


def _request(index: int, length: int, vocab_size: int, params: SamplingParams) -> Request:
    prompt = [token % vocab_size for token in range(1, length + 1)]
    return Request("warm-up", prompt, params, index=index, cache_namespace=f"warm-up {index}")


class WarmUpGate:
    """The engine's first output callback, which counts the warm-up's outputs as they end."""

    def __init__(self) -> None:
        self._ended = threading.Semaphore(0)

    def on_output(self, emission: Emission) -> None:
        """Called by the engine thread."""
        for delta in emission.deltas:
            if delta.finish_reason is not None:
                self._ended.release()

    def run(self, engine: Engine, vocab_size: int, timeout_s: float, prompt_tokens: int = 4) -> None:
        """Raises UserError when the warm-up's requests do not end well."""
        with phase("running the first steps"):
            self._run(engine, vocab_size, timeout_s, prompt_tokens)

    def _run(self, engine: Engine, vocab_size: int, timeout_s: float, prompt_tokens: int) -> None:
        requests = warm_up_requests(vocab_size, prompt_tokens)
        for request in requests:
            engine.submit([request])
        for _ in requests:
            if not self._ended.acquire(timeout=timeout_s):
                raise UserError(f"the warm-up steps did not end within {timeout_s:.0f} s")
        for request in requests:
            if request.error_message:
                raise UserError(f"a warm-up step failed: {request.error_message}")
        engine.flush().result(timeout_s)
        # Not before: what the warm-up computed is no prefix of a request, and a flush goes through all tiers.
        engine.call(OPEN_TIERS).result(timeout_s)
