"""Guards whose turn it is among several models: none waits for ever, nor do they swap for every request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from app.swap.pool import CannotLoad, ModelPool, ModelRunner

RESIDENCY_S = 10.0


class Runner(ModelRunner):
    """Notes what is asked of it in a list that all share."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.fails, self.room = name, log, 0, True
        self._running = False

    async def _done(self, what: str) -> None:
        await asyncio.sleep(0)
        self.log.append(f"{what} {self.name}")

    async def start(self) -> None:
        """Fails as often as the test says."""
        if self.fails:
            self.fails -= 1
            raise CannotLoad(f"{self.name}: no RAM")
        self._running = True
        await self._done("start")

    async def sleep(self) -> None:
        """Sleeps."""
        await self._done("sleep")

    async def wake(self) -> None:
        """Wakes."""
        await self._done("wake")

    async def stop(self) -> None:
        """Ends."""
        if self._running:
            self._running = False
            await self._done("stop")

    @property
    def is_running(self) -> bool:
        """Follows the test."""
        return self._running

    def fits(self) -> bool:
        """Follows the test until another one has stopped."""
        return self.room or any(line.startswith("stop") for line in self.log)


class Models:
    """A pool of models a, b, c, with a clock that the test moves."""

    def __init__(self, max_loaded: int = 1) -> None:
        self.now, self.log = 0.0, list[str]()
        self.runners = {name: Runner(name, self.log) for name in "abc"}
        self.pool = ModelPool(self.runners, max_loaded, RESIDENCY_S, lambda: self.now, look_s=0.001)

    async def ask(self, name: str, until: Awaitable[object] | None = None) -> str:
        """One request, which runs until that is done."""
        async with self.pool.lease(name):
            if until is not None:
                await until
            self.now += 0.001
            return name


async def settled() -> None:
    """Lets everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0.001)


async def test_the_least_recently_used_model_makes_room() -> None:
    """A model starts once, sleeps when another one needs its place, and wakes when it is asked for."""
    models = Models(max_loaded=2)
    for name in "abacab":
        assert await models.ask(name) == name
    await models.pool.close()
    assert models.log[:6] == ["start a", "start b", "sleep b", "start c", "sleep c", "wake b"]
    assert sorted(models.log[6:]) == ["stop a", "stop b", "stop c"]


async def test_requests_for_two_models_in_turn_do_not_thrash() -> None:
    """While requests for it run, a model stays for its time, and requests that come meanwhile are answered;
    then the other one gets its turn though requests for the first go on."""
    models, ends = Models(), [asyncio.Event() for _ in range(3)]
    first = asyncio.create_task(models.ask("a", ends[0].wait()))
    await settled()
    others = [asyncio.create_task(models.ask("b")) for _ in range(5)]
    for _ in range(20):
        assert await models.ask("a") == "a"
    await settled()
    assert models.log == ["start a"]
    models.now += RESIDENCY_S
    await settled()
    late = asyncio.create_task(models.ask("a", ends[1].wait()))
    await settled()
    assert not any(task.done() for task in (*others, late))
    ends[0].set()
    assert await asyncio.gather(first, *others) == ["a", *"bbbbb"]
    ends[1].set()
    assert await late == "a"
    assert models.log == ["start a", "sleep a", "start b", "sleep b", "wake a"]
    await models.pool.close()


async def test_the_oldest_request_is_served_first() -> None:
    """Models that wait get their turn in the order of their requests."""
    models = Models()
    assert await asyncio.gather(*(models.ask(name) for name in "cabca")) == [*"cabca"]
    assert [line for line in models.log if line.startswith("start")] == ["start c", "start a", "start b"]
    assert len(models.log) == 5
    await models.pool.close()


async def test_sleepers_give_up_their_ram_for_a_start() -> None:
    """Where RAM is short, or a start fails, models that sleep are stopped, the least recently used first.
    What fails without any is an error for all who wait, and the next request tries again."""
    models = Models()
    for name in "ab":
        await models.ask(name)
    models.runners["c"].room, models.runners["c"].fails = False, 1
    await models.ask("c")
    assert models.log[3:] == ["sleep b", "stop a", "stop b", "start c"]
    models.runners["a"].fails = 2
    found = await asyncio.gather(models.ask("a"), models.ask("a"), return_exceptions=True)
    assert [str(error) for error in found] == ["a: no RAM", "a: no RAM"]
    assert await models.ask("a") == "a"
    await models.pool.close()


async def test_who_leaves_holds_nothing() -> None:
    """A client that leaves while it waits neither loads a model nor keeps one."""
    models, end = Models(), asyncio.Event()
    first = asyncio.create_task(models.ask("a", end.wait()))
    await settled()
    waiting = asyncio.create_task(models.ask("b"))
    await settled()
    waiting.cancel()
    await settled()
    end.set()
    assert await first == "a"
    await settled()
    assert models.log == ["start a"]
    assert await models.ask("c") == "c"
    await models.pool.close()


async def test_a_model_that_has_ended_starts_again() -> None:
    """Processes that end by themselves are not taken for a model."""
    models = Models()
    await models.ask("a")
    models.runners["a"]._running = False
    await models.ask("a")
    assert models.log == ["start a", "start a"]
    await models.pool.close()


async def test_a_reload_lies_between_old_and_new_requests() -> None:
    """Requests that run are waited for, later ones wait for the new start; a model that is not loaded is read
    again when it is asked for, and one that cannot be read is an error for the operator."""
    models, end = Models(), asyncio.Event()
    await models.pool.reload("a")
    running = asyncio.create_task(models.ask("a", end.wait()))
    await settled()
    reloading = asyncio.create_task(models.pool.reload("a"))
    await settled()
    late = asyncio.create_task(models.ask("a"))
    await settled()
    assert models.log == ["start a"]
    end.set()
    await asyncio.gather(running, reloading, late)
    assert models.log == ["start a", "stop a", "start a"]
    models.runners["a"].fails = 1
    with pytest.raises(CannotLoad, match="a: no RAM"):
        await models.pool.reload("a")
    assert await models.ask("a") == "a"
    await models.pool.close()


async def test_one_that_does_not_wake_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that ended unseen while they slept are started again, and others keep their RAM."""
    models = Models()
    for name in "abc":
        await models.ask(name)

    async def wake(self: Runner) -> None:
        raise CannotLoad("it does not answer")

    monkeypatch.setattr(Runner, "wake", wake)
    assert await models.ask("a") == "a"
    assert models.log[-2:] == ["sleep c", "start a"]
    models.pool.lost("a")
    assert await models.ask("a") == "a"
    assert models.log[-1] == "start a"
    await models.pool.close()


async def test_an_operator_sleeps_and_unloads_models() -> None:
    """Both wait for running requests; a request that comes meanwhile is answered afterwards."""
    models, end = Models(), asyncio.Event()
    running = asyncio.create_task(models.ask("a", end.wait()))
    await settled()
    sleeping = asyncio.create_task(models.pool.put_to_sleep("a"))
    await settled()
    late = asyncio.create_task(models.ask("a"))
    await settled()
    assert not sleeping.done()
    end.set()
    assert [await running, await late] == ["a", "a"]
    await sleeping
    await models.pool.unload("a")
    assert models.log == ["start a", "sleep a", "wake a", "stop a"]
    with pytest.raises(KeyError):
        await models.ask("d")
    await models.pool.close()
