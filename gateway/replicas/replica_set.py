"""Uses all replicas of one model as if they were one engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog

from gateway.replicas.addresses import is_name, resolved
from gateway.replicas.engine_client import EngineClient, call_error
from gateway.replicas.prefixes import block_digests
from gateway.replicas.replica import Replica, difference, other_files
from gateway.replicas.routing import choose, last_resort
from gateway.telemetry.metrics import ReplicaMetrics
from moebius.models.identity import identity_digest
from moebius.process.sleep_mark import FORCED, SleepMark
from protos import engine_pb2

logger = structlog.get_logger(__name__)
POLL_S = 1.0  # between two polls of a replica
RESOLVE_S = 5.0
_ANSWER_S = 60.0  # of a process that has just begun, on a busy machine
_ATTEMPTS = 3  # a request that crashes its engine must not crash all
# The engine is gone or stopping, or its queue is full: another may have room. Other errors are the request's.
_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)

# What a call fails with whose engine falls asleep or wakes; how long until it is repeated.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_PAUSE_S = 0.1


@dataclass(frozen=True)
class SleepRules:
    """What is known of a sleeping engine; filled from the settings."""

    mark: SleepMark
    wakes_on_request: bool = True
    longest_wait_s: float = 1800.0


class Patience:
    """The patience of one request, from before its first call; for an operator's own calls, too."""

    def __init__(self, rules: SleepRules) -> None:
        self._rules = rules
        self._slept = rules.mark.exists
        self._until = time.monotonic() + rules.longest_wait_s

    async def lasts(self, error: grpc.aio.AioRpcError) -> bool:
        """Returns whether a call that has failed without an answer is to be repeated, after a pause.

        It is while the engine sleeps, falls asleep or wakes, be it that it is killed meanwhile; not once
        force has ended the call.
        """
        self._slept = self._slept or self._rules.mark.exists
        if error.code() not in _GONE or not self._slept or error.details() == FORCED:
            return False
        if not self._rules.wakes_on_request or time.monotonic() > self._until:
            return False
        await asyncio.sleep(_PAUSE_S)
        return True


class ReplicaSet:
    """The replicas at some addresses. Methods that ask the engine raise `grpc.aio.AioRpcError`."""

    def __init__(
        self,
        addresses: Sequence[str],
        metrics: ReplicaMetrics,
        resolve: Callable[[str], Awaitable[list[str] | None]] = resolved,
        poll_s: float = POLL_S,
        resolve_s: float = RESOLVE_S,
        sleep: SleepRules | None = None,
    ) -> None:
        """`addresses`: host:port or unix:path each; all addresses of a name are replicas.

        `sleep`: of an engine on this host that may sleep; None: that of others is not seen here.
        """
        self._addresses = tuple(addresses)
        self._metrics = metrics
        self._resolve = resolve
        self._poll_s, self._resolve_s = poll_s, resolve_s
        self._sleep = sleep or SleepRules(SleepMark(""))
        self._names: dict[str, str] = {}  # the name by which an address was found
        self._found: dict[str, list[str]] = {}  # by name: its addresses at the last lookup
        self.replicas: dict[str, Replica] = {}
        self._info: engine_pb2.GetModelInfoResponse | None = None  # the facts that all must agree with
        self._identity = ""  # the digest of their files
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def address(self) -> str:
        """The addresses, for log lines."""
        return ", ".join(self._addresses)

    @property
    def _is_one(self) -> bool:
        return len(self.replicas) == 1

    async def open(self) -> None:
        """Resolves the replicas' addresses and starts polling them."""
        await self._resolve_names()
        if any(map(is_name, self._addresses)):
            self._tasks[""] = asyncio.create_task(self._keep_resolving())

    async def close(self) -> None:
        """Closes all connections; running calls end with CANCELLED."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(replica.client.close() for replica in self.replicas.values()))

    def generate(
        self, request: engine_pb2.GenerateRequest, context: Any = None, images: Sequence[bytes] = ()
    ) -> AsyncGenerator[engine_pb2.GenerateResponse, None]:
        """Calls `EngineClient.generate` of the best replica for the request, or of another if that fails
        before it has sent anything."""
        if self._is_one:  # no choice
            (only,) = self.replicas.values()
            return self._on(only, request, context, images)
        return self._on_best(request, context, images)

    async def _on_best(
        self, request: engine_pb2.GenerateRequest, context: Any, images: Sequence[bytes]
    ) -> AsyncGenerator[engine_pb2.GenerateResponse, None]:
        """Runs the call on the best replica, or on the next best."""
        tokens = request.tokenized.input_ids
        digests = block_digests(tokens, request.cache_salt)
        tried: list[Replica] = []
        while True:
            untried = [replica for replica in self.replicas.values() if replica not in tried]
            replica = choose(untried, digests) or last_resort(untried)
            if replica is None:
                raise call_error(grpc.StatusCode.UNAVAILABLE, self._why_none())
            tried.append(replica)
            replica.prefixes.note(digests)
            has_begun = False
            try:
                async with aclosing(self._on(replica, request, context, images)) as responses:
                    async for response in responses:
                        has_begun = True
                        yield response
                return
            except grpc.aio.AioRpcError as error:
                if has_begun or not self.may_try_again(error, len(tried)):
                    raise
                self._metrics.retried(replica.address)
                logger.warning(
                    "request goes to another replica",
                    request_id=request.request_id,
                    address=replica.address,
                    status=error.code().name,
                )

    def may_try_again(self, error: grpc.aio.AioRpcError, attempts: int) -> bool:
        """Returns whether a request of which nothing has been sent may be repeated after `attempts`."""
        return error.code() in _RETRIED and attempts < min(_ATTEMPTS, len(self.replicas))

    async def _on(
        self, replica: Replica, request: engine_pb2.GenerateRequest, context: Any, images: Sequence[bytes]
    ) -> AsyncGenerator[engine_pb2.GenerateResponse, None]:
        """Runs the call on one replica, and notes the result for its state."""
        request.model_identity = replica.identity or self._identity
        patience, waits, has_begun = Patience(self._sleep), True, False
        replica.in_flight += 1
        self._metrics.in_flight(replica.address, +1)
        try:
            while waits:
                waits = False
                try:
                    async with aclosing(replica.client.generate(request, context, images)) as responses:
                        async for response in responses:
                            has_begun = True
                            if replica.failures:
                                replica.worked()
                            yield response
                except grpc.aio.AioRpcError as error:
                    waits = not has_begun and await patience.lasts(error)
                    if not waits:
                        raise
            self._metrics.ended(replica.address, "ok")
        except grpc.aio.AioRpcError as error:
            self._metrics.ended(replica.address, error.code().name.lower())
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                replica.failed()
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:  # it was restarted with other files
                await self._compare(replica)
                reason = replica.mismatch or "it was restarted: try again"
                raise call_error(grpc.StatusCode.UNAVAILABLE, reason) from error
            raise
        finally:
            replica.in_flight -= 1
            self._metrics.in_flight(replica.address, -1)

    def _why_none(self) -> str:
        reasons = [f"{one.address}: {one.mismatch}" for one in self.replicas.values() if one.mismatch]
        return "; ".join(reasons) or f"no replica at {self.address}"

    async def model_info(self) -> engine_pb2.GetModelInfoResponse:
        """Returns the facts that all replicas agree on, from the first that answers."""
        if self._info is not None:
            return self._info
        if not self.replicas:
            raise call_error(grpc.StatusCode.UNAVAILABLE, self._why_none())
        failure: grpc.aio.AioRpcError | None = None
        for replica in list(self.replicas.values()):  # replicas may come and go meanwhile
            try:
                info = await replica.client.model_info()
            except grpc.aio.AioRpcError as error:
                failure = failure or error
                continue
            self._note(replica, info)
            return info
        assert failure is not None
        raise failure

    async def why_not_serving(self) -> str:
        """Returns why no replica would answer a request now; empty: at least one would."""
        if self._is_one:  # a single one is not polled
            (only,) = self.replicas.values()
            if await only.client.is_serving() and await self._compare(only) and not only.mismatch:
                return ""
            return only.mismatch or self._not_serving
        usable = [one for one in self.replicas.values() if not (one.mismatch or one.is_leaving)]
        if any(await asyncio.gather(*(replica.client.is_serving() for replica in usable))):
            return ""
        return self.other_model or self._not_serving

    @property
    def other_model(self) -> str:
        """Returns why none of the replicas can be used until this gateway is restarted; empty: one can."""
        present = [one for one in self.replicas.values() if not one.is_leaving]
        return self._why_none() if present and all(one.mismatch for one in present) else ""

    @property
    def _not_serving(self) -> str:
        """The reason that a replica gave when it was last polled, if any."""
        said = next((one.client.not_ready for one in self.replicas.values() if one.client.not_ready), "")
        return f"the engine is not serving: {said or 'it is starting, stopping or gone'}"

    async def live(self, number: int = 0) -> engine_pb2.GetLiveResponse:
        """Returns the figures of one replica, by its place among `replicas`."""
        found = list(self.replicas.values())[number : number + 1]
        if not found:
            raise call_error(grpc.StatusCode.UNAVAILABLE, self._why_none())
        return await found[0].client.live()

    async def load(self) -> engine_pb2.GetLoadResponse:
        """Returns the load of the first replica that answers, with all replicas' counts added up."""
        if self._is_one:
            only: engine_pb2.GetLoadResponse = await self._first(lambda client: client.load())
            return only
        asked = (replica.client.load() for replica in self.replicas.values() if not replica.is_leaving)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        loads = [one for one in answers if isinstance(one, engine_pb2.GetLoadResponse)]
        if not loads:
            raise call_error(grpc.StatusCode.UNAVAILABLE, self._why_none())
        total = loads[0]
        for other in loads[1:]:
            for name in _ADDED:
                setattr(total, name, getattr(total, name) + getattr(other, name))
        total.token_usage = total.num_used_tokens / max(total.max_total_num_tokens, 1)
        return total

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests by their ids, whichever replica has them."""
        asked = (replica.client.abort(request_ids) for replica in self.replicas.values())
        await asyncio.gather(*asked, return_exceptions=True)

    async def flush_cache(self) -> int:
        """Drops cached prefixes of all replicas; returns how many tokens they had. Raises AioRpcError."""
        return sum(await asyncio.gather(*(one.client.flush_cache() for one in self.replicas.values())))

    @property
    def sleep(self) -> SleepRules:
        """What is known here of the engine's sleep."""
        return self._sleep

    async def is_sleeping(self) -> bool:
        """Returns whether all engines sleep, or are about to; one that does not answer does not."""
        if self._sleep.mark.exists:
            return True
        asked = (one.client.load() for one in self.replicas.values() if not one.is_leaving)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        loads = [one for one in answers if isinstance(one, engine_pb2.GetLoadResponse)]
        return bool(loads) and all(load.is_sleeping for load in loads)

    async def put_to_sleep(self, force: bool) -> None:
        """Returns when no engine computes any more, and its memory is given back. Raises AioRpcError.

        An engine whose mark is not seen here has given it back a moment later.
        """
        await self._each(lambda client: client.put_to_sleep(force))
        if self._sleep.mark.has_place:
            await self._each(lambda client: client.load(_ANSWER_S))

    async def wake_up(self) -> None:
        """Returns when all engines have their models in memory. Raises AioRpcError."""
        await self._each(lambda client: client.wake_up())

    async def _each(self, ask: Callable[[EngineClient], Awaitable[object]]) -> None:
        """Asks all engines; one that is between sleep and waking is asked again, whatever requests may."""
        rules = replace(self._sleep, wakes_on_request=True)

        async def patiently(client: EngineClient) -> None:
            patience = Patience(rules)
            while True:
                try:
                    await ask(client)
                    return
                except grpc.aio.AioRpcError as error:
                    if not await patience.lasts(error):
                        raise

        await asyncio.gather(*(patiently(one.client) for one in self.replicas.values()))

    async def metrics(self) -> dict[str, engine_pb2.GetMetricsResponse]:
        """Returns the engines' counters by label: "0" for a single one, else its address."""
        asked = [one for one in self.replicas.values() if not one.is_leaving]
        answers = await asyncio.gather(*(one.client.metrics() for one in asked), return_exceptions=True)
        labels = ["0"] if len(asked) == 1 else [one.address for one in asked]
        found = zip(labels, answers, strict=True)
        return {label: page for label, page in found if isinstance(page, engine_pb2.GetMetricsResponse)}

    async def _first(self, ask: Callable[[EngineClient], Awaitable[Any]]) -> Any:
        failure = call_error(grpc.StatusCode.UNAVAILABLE, self._why_none())
        for replica in sorted(self.replicas.values(), key=lambda one: not one.may_be_used):
            try:
                return await ask(replica.client)
            except grpc.aio.AioRpcError as error:
                failure = error
        raise failure

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(self._resolve_s)
            await self._resolve_names()

    async def _resolve_names(self) -> None:
        """Adds new replicas, and marks those whose address is gone as leaving."""
        wanted: list[str] = []
        for address in self._addresses:
            if not is_name(address):
                wanted.append(address)
                continue
            found = await self._resolve(address)
            if found is not None:
                self._found[address] = found
            wanted += self._found.get(address, [])
            self._names.update(dict.fromkeys(self._found.get(address, []), address.rpartition(":")[0]))
        for address in dict.fromkeys(wanted):
            known = self.replicas.get(address)
            if known is None:
                self._add(address)
            elif known.is_leaving:
                known.is_leaving = False
        for address, replica in self.replicas.items():
            if address not in wanted and not replica.is_leaving:
                replica.is_leaving = True
                logger.info("replica leaves", address=address)

    def _add(self, address: str) -> None:
        self.replicas[address] = Replica(
            address, EngineClient(address, server_name=self._names.get(address, ""))
        )
        if len(self._addresses) > 1 or any(map(is_name, self._addresses)):
            logger.info("replica", address=address)
            self._tasks[address] = asyncio.create_task(self._monitor(self.replicas[address]))

    async def _monitor(self, replica: Replica) -> None:
        """Polls one replica until it has left and its last request has ended."""
        while not (replica.is_leaving and replica.in_flight == 0):
            await self._poll(replica)
            await asyncio.sleep(self._poll_s)
        del self.replicas[replica.address], self._tasks[replica.address]
        self._metrics.gone(replica.address)
        await replica.client.close()

    async def _poll(self, replica: Replica) -> None:
        serving = await replica.client.is_serving()
        if serving and (replica.info is None or not replica.is_serving):
            # It may have restarted, with another model, and its cache is empty.
            replica.prefixes.clear()
            serving = await self._compare(replica)
        if serving != replica.is_serving:
            logger.info("replica", address=replica.address, serving=serving)
        replica.is_serving = serving
        self._metrics.up(replica.address, serving and not replica.mismatch)
        with contextlib.suppress(grpc.aio.AioRpcError):  # else its load is what this process sent
            load = await replica.client.load()
            replica.reported, replica.reported_own = load.num_total_reqs, replica.in_flight
            replica.max_running = load.max_running_requests or replica.max_running

    async def _compare(self, replica: Replica) -> bool:
        """Returns whether its model is known now; a different model is logged once."""
        try:
            info = await replica.client.model_info()
        except grpc.aio.AioRpcError:
            return False
        self._note(replica, info)
        return True

    def _note(self, replica: Replica, info: engine_pb2.GetModelInfoResponse) -> None:
        """Compares a replica's model with the facts that all must agree with."""
        if self._info is None:
            self._info, self._identity = info, identity_digest(info.identity)
        # Facts of a single replica may change with its restart, such as the cache's size.
        mismatch = (other_files if self._is_one else difference)(self._info, info)
        replica.info, replica.identity = info, identity_digest(info.identity)
        if mismatch and mismatch != replica.mismatch:
            logger.error(
                "replica has another model and is not used", address=replica.address, reason=mismatch
            )
        replica.mismatch = mismatch


_ADDED = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_total_reqs",
    "num_used_tokens",
    "max_total_num_tokens",
    "gen_throughput",
    "max_running_requests",
    "num_preemptions",
    "num_cached_tokens",
    "draft_tokens",
    "accepted_tokens",
)
