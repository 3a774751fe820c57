"""How one token budget is divided, and who is let in.

Decides numbers only; allocating pages and moving requests between queues is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_service.cache.radix_cache import PrefixHandle
from gpu_service.cache.request_cache import RequestCache
from gpu_service.request import Request
from gpu_service.scheduler.finish import ends_by_length
from gpu_service.scheduler.limits import SchedulerLimits


def seniority(request: Request) -> tuple[int, int, int]:
    """Sort key: larger priority first, then earlier arrival, then output index."""
    return (-request.priority, request.arrival, request.index)


def chunk_size(start: int, remaining: int, budget: int, page_size: int, splits: bool = False) -> int:
    """Tokens to compute now from position `start`.

    A chunk that is not the last one ends on a page boundary, so that its pages are whole; unless the
    budget does not reach one, since progress matters more. With `splits` the last one, too, ends on the
    last boundary that leaves a token to compute: a prefix can end there only if a step does.
    """
    if remaining <= budget:
        whole = (start + remaining - 1) // page_size * page_size - start
        return whole if splits and whole > 0 else remaining
    aligned = (start + budget) // page_size * page_size - start
    return aligned if aligned > 0 else budget


def divide_budget(
    running: Sequence[Request], limits: SchedulerLimits, page_size: int, splits: bool = False
) -> dict[int, int]:
    """Tokens for each running request, by its index in `running`.

    Requests that need one token come first, least recently served first, so that a long prompt never
    holds up decoding and nobody starves when there are more requests than budget. What is left goes to
    prompts in order of seniority. `splits` as in `chunk_size`.
    """
    budget = limits.max_num_batched_tokens
    counts: dict[int, int] = {}
    needs = {
        index: request.planned_len - request.scheduled_len
        for index, request in enumerate(running)
        if request.planned_len > request.scheduled_len and not _waits_for_end(request, limits)
    }
    for index in sorted((i for i in needs if needs[i] == 1), key=lambda i: (running[i].last_step, i)):
        counts[index] = min(1, budget)
        budget -= counts[index]
    for index in (i for i in needs if needs[i] > 1):
        counts[index] = chunk_size(running[index].scheduled_len, needs[index], budget, page_size, splits)
        budget -= counts[index]
    return {index: count for index, count in counts.items() if count > 0}


def _waits_for_end(request: Request, limits: SchedulerLimits) -> bool:
    """Whether the token in flight is the last by length, so that nothing after it is to be computed."""
    return request.inflight_tokens > 0 and ends_by_length(request, request.planned_len, limits)


def next_admissible(
    waiting: Iterable[Request], running: Sequence[Request], cache: RequestCache
) -> Request | None:
    """The first waiting request that need not wait for a sibling.

    While one output of a request is still computing the prompt, its siblings wait: they will find the
    prompt's pages in the prefix tree.
    """
    computing = {request.request_id for request in running if request.computed_len < request.prompt_len}
    for request in waiting:
        shares = cache.prefix_caching and request.params.prompt_logprobs is None
        long_enough = request.prompt_len > cache.page_size
        if not (shares and long_enough and request.request_id in computing):
            return request
    return None


def fits(
    request: Request, handle: PrefixHandle | None, cache: RequestCache, limits: SchedulerLimits, idle: bool
) -> bool:
    """Whether all known tokens of the request would have pages now, with the watermark left over.

    Output is not reserved for: running requests grow into the watermark and then into preemption.
    With nothing running (`idle`) the watermark is waived, or a request as large as the pool would wait
    forever.
    """
    held = len(handle.pages) if handle else 0
    pinned = cache.tree.unlocked_pages(handle) if handle else 0
    needed = cache.pages_for(request.total_len) - held
    return needed + (0 if idle else limits.watermark_pages) <= cache.available - pinned
