"""How one token budget is divided, who is let in, and which client's requests are next.

Decides numbers only; allocating pages and moving requests between queues is the scheduler's.

Each client gets an equal share of the tokens computed, as long as several wait. Clients differ by
`Request.fairness_id`. What one was served is the tokens that were computed for it, prompt and output, each
position once: neither cached prefixes nor what a preemption has computed again. As a request's place in the
batch is a promise of more, a client's account also has what its running requests still need: the rest of
their prompts, and as much output as requests have had lately. With one client, or as long as nothing waits,
requests are in order of seniority, as if there were no shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from gpu_service.cache.radix_cache import PrefixHandle
from gpu_service.cache.request_cache import RequestCache
from gpu_service.core.request import Request, SchedulerLimits
from gpu_service.core.step import Batch
from moebius.fair_shares import FairShares, in_turns, is_below_share

# Sort key of requests: what their client was served, then seniority.
Rank = tuple[float, tuple[int, int, int]]


def seniority(request: Request) -> tuple[int, int, int]:
    """Sort key: lower priority first, then earlier arrival, then output index."""
    return (request.priority, request.arrival, request.index)


def chunk_size(start: int, remaining: int, budget: int, page_size: int, splits: bool = False) -> int:
    """Returns tokens to compute now from position `start`.

    A chunk that is not the last one ends on a page boundary, so that its pages are whole; unless the
    budget does not reach one, since progress matters more. With `splits` the last one, too, ends on the
    last boundary that leaves a token to compute: a prefix can end there only if a step does.
    """
    if remaining <= budget:
        whole = (start + remaining - 1) // page_size * page_size - start
        return whole if splits and whole > 0 else remaining
    aligned = (start + budget) // page_size * page_size - start
    return aligned if aligned > 0 else budget


def next_chunk(
    request: Request, start: int, remaining: int, budget: int, page_size: int, splits: bool
) -> int:
    """`chunk_size`, but no image is cut whose tokens see one another; 0: the next one needs more budget."""
    count = chunk_size(start, remaining, budget, page_size, splits)
    return count if request.vision is None else request.vision.uncut(start, count, budget)


def least_chunk(request: Request, start: int) -> int:
    """Returns the fewest tokens that can be computed from `start` on."""
    return 1 if request.vision is None else request.vision.uncut(start, 1, request.total_len)


@dataclass(slots=True)
class Division:
    """One step's budget; filled by `divide_budget`."""

    # Tokens of running requests, by index in `running`; none of them 0.
    counts: dict[int, int]
    # Waiting requests in the order of admission, and what is set aside for each: 0 for those that start only
    # if others need less than was estimated.
    newcomers: list[tuple[Request, int]]
    # Budget that running requests leave: for newcomers.
    left: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request with more than one token to compute; of a waiting one `need` is an estimate."""

    request: Request
    need: int
    # Index in `running`; -1: it waits.
    index: int = -1


def token_cost(request: Request, limits: SchedulerLimits) -> int:
    """Returns a token's share of the budget: more, if the head has to score every position."""
    scores = request.params.prompt_logprobs is not None and request.scheduled_len < request.prompt_len
    return limits.scored_token_cost if scores else 1


def divide_budget(
    running: Sequence[Request],
    newcomers: Sequence[Prompt],
    limits: SchedulerLimits,
    page_size: int,
    splits: bool = False,
    excluded: Callable[[Request, int], bool] | None = None,
    budget: int | None = None,
    rank: Callable[[Request], Any] = seniority,
) -> Division:
    """Returns which request computes how much in the next step.

    Requests that need one token come first, least recently served first, so that a prompt never holds up
    decoding and none starves when there are more requests than budget. Of the rest the oldest prompt has
    half for itself; the other half goes to the shortest prompts first, whether they run already or wait
    (`newcomers`). So a short prompt starts at once however long the others are, and a long one is held up by
    at most as many tokens as it computes itself. Of prompts of one length the older is done first: sharing
    evenly would delay the older and hasten none. `rank`: which prompt is the oldest, where clients share.
    `splits` as in `chunk_size`; `excluded` says, of a running
    request and the tokens that it needs, whether it is another step's (None: none is); `budget` other than
    the usual one.
    """
    division = Division({}, [], limits.max_num_batched_tokens if budget is None else budget)
    decoding: list[int] = []
    last_steps: list[int] = []
    prompts: list[Prompt] = []
    for index, request in enumerate(running):
        need = request.planned_len - request.scheduled_len
        if need <= 0 or _waits_for_end(request):
            continue
        if excluded is not None and excluded(request, need):
            continue
        if need == 1:
            decoding.append(index)
            last_steps.append(request.last_step)
        else:
            prompts.append(Prompt(request, need, index))
    if len(set(last_steps)) > 1:
        decoding.sort(key=lambda index: running[index].last_step)
    division.counts = dict.fromkeys(decoding[: max(0, division.left)], 1)
    division.left -= len(division.counts)
    prompts += newcomers
    _make_room(division, prompts, limits, rank)
    divide_among_prompts(division, prompts, limits, page_size, splits, rank)
    return division


def all_decode(running: Sequence[Request], page_size: int, step: int) -> tuple[Batch, list[Request]] | None:
    """Returns a step of one token of all running requests that do not wait for their end, of which they know
    nothing yet, and which of them need another page for it; None: one needs more tokens, or has to follow a
    grammar.

    It is what `divide_budget` comes to in nearly every step, for a fraction of the work.
    """
    chosen, starts, positions, growing = list[Request](), list[int](), list[int](), list[Request]()
    for request in running:
        start, in_flight = request.scheduled_len, request.inflight_tokens
        position = len(request.output_token_ids) + in_flight
        need = request.prompt_len + position - start
        if need > 1 or request.constraint is not None:
            return None
        if need < 1 or (in_flight and position >= request.longest_output) or request.in_lane:
            continue
        chosen.append(request)
        starts.append(start)
        positions.append(position)
        if start >= len(request.pages) * page_size:
            growing.append(request)
    count = len(chosen)
    batch = Batch(chosen, starts, [1] * count, [True] * count, output_positions=positions, step=step)
    return batch, growing


def divide_among_prompts(
    division: Division,
    prompts: Sequence[Prompt],
    limits: SchedulerLimits,
    page_size: int,
    splits: bool,
    rank: Callable[[Request], Any] = seniority,
) -> None:
    """What is left of the budget, as `divide_budget` says."""
    if not prompts or division.left <= 0:
        return
    oldest = min(prompts, key=lambda prompt: rank(prompt.request))
    reserved = max((division.left + 1) // 2, min(division.left, _least_cost(oldest, limits)))
    budget = division.left - reserved
    for prompt in sorted(prompts, key=turn):
        request, cost = prompt.request, token_cost(prompt.request, limits)
        start = request.scheduled_len if prompt.index >= 0 else 0
        allowed = budget + reserved if prompt is oldest else budget
        count = next_chunk(request, start, prompt.need, allowed // cost, page_size, splits)
        if prompt is oldest:
            count = max(1, count) if request.vision is None else count
            reserved = 0
        elif count < min(prompt.need, page_size):
            # What is left over from rounding is no chunk worth a row of its own.
            count = 0
        budget = max(0, allowed - count * cost)
        if prompt.index >= 0 and count:
            division.counts[prompt.index] = count
            division.left -= count * cost
        elif prompt.index < 0:
            newcomer = (request, count * cost)
            division.newcomers.insert(0 if prompt is oldest else len(division.newcomers), newcomer)


def _least_cost(prompt: Prompt, limits: SchedulerLimits) -> int:
    """Returns the part of the budget that the fewest tokens take that a prompt can compute."""
    start = prompt.request.scheduled_len if prompt.index >= 0 else 0
    return least_chunk(prompt.request, start) * token_cost(prompt.request, limits)


def _make_room(
    division: Division,
    prompts: Sequence[Prompt],
    limits: SchedulerLimits,
    rank: Callable[[Request], Any],
) -> None:
    """Decoding waits for a step where the oldest prompt's next image would never fit beside it."""
    if not prompts:
        return
    oldest = min(prompts, key=lambda prompt: rank(prompt.request))
    least = _least_cost(oldest, limits)
    while least > 1 and division.left < least and division.counts:
        division.counts.popitem()
        division.left += 1


def turn(prompt: Prompt) -> tuple[int, int, tuple[int, int, int]]:
    """Sort key: lower priority first, then shorter, then older."""
    return (prompt.request.priority, prompt.need, seniority(prompt.request))


def _waits_for_end(request: Request) -> bool:
    """Returns whether the token in flight is the last by length, so that nothing follows it."""
    in_flight = request.inflight_tokens
    return in_flight > 0 and len(request.output_token_ids) + in_flight >= request.longest_output


def shares_prompt(request: Request, cache: RequestCache) -> bool:
    """Returns whether outputs of one request can start from the prompt that one of them computed."""
    shares = cache.prefix_caching and request.params.prompt_logprobs is None
    return shares and request.prompt_len > cache.page_size


def admissible(
    waiting: Iterable[Request], running: Sequence[Request], cache: RequestCache, limits: SchedulerLimits
) -> Iterator[Request]:
    """The waiting requests that need not wait for a sibling or for their prefix, in order.

    While one output of a request is still computing the prompt, its siblings wait: they will find the
    prompt's pages in the prefix tree. So does one whose prefix is on its way from a lower tier.
    """
    computing = {request.request_id for request in running if request.computed_len < request.prompt_len}
    for request in waiting:
        if shares_prompt(request, cache):
            if request.request_id in computing:
                continue
            computing.add(request.request_id)
        if not awaits_prefix(request, cache, limits, running):
            yield request


def awaits_prefix(
    request: Request, cache: RequestCache, limits: SchedulerLimits, running: Sequence[Request]
) -> bool:
    """Whether the request's prefix is on its way from a lower tier; begins to fetch it where it has room."""
    return cache.tiers is not None and cache.tiers.awaits(
        request, lambda handle: fits(request, handle, cache, limits, running)
    )


def fits(
    request: Request,
    handle: PrefixHandle | None,
    cache: RequestCache,
    limits: SchedulerLimits,
    running: Sequence[Request],
) -> bool:
    """Whether all known tokens of the request would have pages now, with the watermark left over.

    Pages that running prompts will still take are theirs already: a short prompt that overtakes a long one
    would only be preempted by it. Output is not reserved for: running requests grow into the watermark and
    then into preemption. With nothing running the watermark is waived, or a request as large as the pool
    would wait forever.
    """
    held = len(handle.pages) if handle else 0
    pinned = cache.tree.unlocked_pages(handle) if handle else 0
    needed = cache.pages_for(request.total_len) - held
    promised = sum(
        max(0, cache.pages_for(other.total_len) - len(other.pages))
        for other in running
        if other.planned_len - other.scheduled_len > 1
    )
    return needed + (limits.watermark_pages if running else 0) <= cache.available - pinned - promised


# Output tokens that a request is expected to have, before any has ended, and the weight of the newest.
_FIRST_OUTPUT, _NEWEST = 64.0, 0.1


class ClientShares:
    """The accounts of all clients; the scheduler calls it in the same order on every rank."""

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()  # unfinished requests
        self._shares = FairShares()
        self._output = _FIRST_OUTPUT
        self._accounts: dict[str, float] = {}  # of the step that is planned; empty: seniority alone counts

    def came(self, request: Request) -> None:
        """A request is queued."""
        self._live[request.fairness_id] += 1

    def went(self, request: Request) -> None:
        """A request has ended, well or not."""
        self._live[request.fairness_id] -= 1
        if not self._live[request.fairness_id]:
            del self._live[request.fairness_id]
        if request.output_token_ids:
            self._output += _NEWEST * (len(request.output_token_ids) - self._output)

    def computes(self, request: Request, end: int) -> None:
        """The request's tokens up to position `end` are in a step."""
        if end > request.charged_len:
            self._shares.charge(request.fairness_id, end - request.charged_len)
            request.charged_len = end

    def decoded(self, clients: Iterable[str]) -> None:
        """A token of each of these clients' requests is in a step; each name as often as it has some."""
        for client, count in Counter(clients).items():
            self._shares.charge(client, count)

    def weigh(self, waiting: Sequence[Request], running: Sequence[Request]) -> None:
        """Before a step is planned: what each client that waits has had, and what it was promised."""
        self._accounts = {}
        if len(self._live) < 2:
            self._shares.settle(())
            return
        prompts = [request for request in running if request.planned_len - request.scheduled_len > 1]
        behind = dict.fromkeys(request.fairness_id for request in (*waiting, *prompts))
        self._shares.settle(behind)
        if len(behind) < 2:
            return
        self._accounts = {client: self._shares.served(client) for client in self._live}
        for request in running:
            self._accounts[request.fairness_id] += self._promised(request)

    def _promised(self, request: Request) -> float:
        """Returns the tokens that a request is likely to take from where it stands."""
        output = min(float(request.params.max_tokens), self._output) - len(request.output_token_ids)
        return max(0, request.prompt_len - max(request.scheduled_len, request.charged_len)) + max(0.0, output)

    def rank(self, request: Request) -> Rank:
        """Sort key: who is first of several prompts in a step."""
        return (self._accounts.get(request.fairness_id, 0.0), seniority(request))

    def oldest(self, candidates: Sequence[Request]) -> Request:
        """The waiting request that no other may overtake: the oldest of the client that was served least."""
        return min(candidates, key=self.rank) if self._accounts else candidates[0]

    def choose(self, prompts: Sequence[Prompt], count: int) -> list[Prompt]:
        """Returns the `count` waiting requests that may start, in order of seniority.

        Of each client the oldest, then the shortest; of clients in turns.
        """
        queues: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            queues.setdefault(prompt.request.fairness_id if self._accounts else "", []).append(prompt)
        ordered = {
            client: iter([first, *nsmallest(count - 1, others, key=turn)])
            for client, (first, *others) in queues.items()
        }
        chosen = in_turns(ordered, lambda client: self._accounts.get(client, 0.0), self._cost)
        return [prompt for prompt, _ in zip(chosen, range(count), strict=False)]

    def check_integrity(self, unfinished: Sequence[Request]) -> None:
        """Raises AssertionError unless the clients are those of the unfinished requests."""
        assert self._live == Counter(request.fairness_id for request in unfinished), "clients lost or doubled"

    def _cost(self, prompt: Prompt) -> float:
        return prompt.need + min(float(prompt.request.params.max_tokens), self._output)


def may_wait(waiting: Sequence[Request], requests: Sequence[Request], limit: int) -> bool:
    """Whether the outputs of one request may wait although `limit` do: others do, and their client has less
    than an equal share. Any thread may ask, with the scheduler's own list."""
    taken = Counter(request.fairness_id for request in list(waiting))
    client = requests[0].fairness_id
    return bool(taken.keys() - {client}) and is_below_share(taken, client, limit, len(requests))
