"""Expert servers are hurt again while the engine recovers from a first loss of them: no request fails."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moebius.kernels.weight_segment import WeightSegment, segment_path
from moebius.mailbox import ServerState, server_health
from tests.drills.load import GreedyLoad, tally
from tests.drills.report import Report
from tests.drills.session import Session, promise_right, served, serves_again, undisturbed, wait_for
from tests.helpers.stack import mailboxes_of

MAX_TOKENS = 96
# From a server's return on, the second fault comes within this time.
SOON_S = 0.3
# A start of Python on a busy machine, and a hang before it.
BACK_S = 120.0
LOOK_S = 0.001


class Servers:
    """The expert servers of a session as their mailbox shows them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        (self.mailbox,) = mailboxes_of(session.stack)

    def look(self, index: int) -> ServerState:
        """Returns one server now."""
        return server_health(self.mailbox)[index]

    def strike(self, index: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to the process that is that server now; its pid."""
        pid = self.look(index).pid
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, number)
        return pid

    def wait(self, index: int, former: int, condition: Callable[[ServerState], bool]) -> bool:
        """Until a successor of process `former` is as wished; looks a thousand times a second."""

        def is_so() -> bool:
            found = self.look(index)
            return found.pid not in (0, former) and condition(found)

        return wait_for(is_so, BACK_S, LOOK_S)

    def damage(self, index: int) -> None:
        """Flips the bits of the first expert's first bytes in the memory that a successor will find."""
        (directory,) = Path(self.session.stack.state_dir).glob("serve-*")
        path = segment_path(str(directory), index)
        segment = WeightSegment.open(path)
        offset = min(layer.offset for layer in segment.layers.values())
        segment.close()
        with path.open("r+b") as file:
            file.seek(offset)
            content = bytes(byte ^ 0xFF for byte in file.read(256))
            file.seek(offset)
            file.write(content)


def _is_ready(found: ServerState) -> bool:
    return found.state == "ready"


def _killed_when_ready(servers: Servers, victims: Sequence[int], chance: random.Random) -> None:
    """Half of them at once, when it is compared with its predecessor."""
    for index, former in [(index, servers.strike(index)) for index in victims]:
        servers.wait(index, former, _is_ready)
    time.sleep(max(0.0, chance.uniform(-SOON_S, SOON_S)))
    for index in victims:
        servers.strike(index)


def _killed_in_its_check(servers: Servers, victims: Sequence[int], chance: random.Random) -> None:
    """The first request that a newcomer gets is one of its check."""
    for index, former in [(index, servers.strike(index)) for index in victims]:
        servers.wait(index, former, lambda found: found.calls > 0 or found.request_s > 0)
        servers.strike(index)


def _killed_while_it_loads(servers: Servers, victims: Sequence[int], chance: random.Random) -> None:
    for index, former in [(index, servers.strike(index)) for index in victims]:
        servers.wait(index, former, lambda found: True)
        servers.strike(index)


def _frozen_when_ready(servers: Servers, victims: Sequence[int], chance: random.Random) -> None:
    """It stays so, until the supervisor replaces it."""
    for index, former in [(index, servers.strike(index)) for index in victims]:
        servers.wait(index, former, _is_ready)
        servers.strike(index, signal.SIGSTOP)


def _damaged(servers: Servers, victims: Sequence[int], chance: random.Random) -> None:
    """What the successor finds packed is not what its predecessor packed."""
    for index in victims:
        servers.strike(index)
        servers.damage(index)


Fault = Callable[[Servers, Sequence[int], random.Random], None]
BOTH = (0, 1)
# What is done, to whom in turn.
OTHERS: tuple[tuple[str, Fault, tuple[tuple[int, ...], ...]], ...] = (
    ("killed in its check", _killed_in_its_check, ((0,), (1,))),
    ("killed while it loads", _killed_while_it_loads, ((0,), (1,))),
    ("both killed, and both again", _killed_when_ready, (BOTH,)),
    ("frozen when ready", _frozen_when_ready, ((0,), (1,))),
    ("its packed experts damaged", _damaged, ((0,), (1,))),
)
MAIN = ("killed again when ready", _killed_when_ready, ((0,), (1,)))


def run(report: Report, rounds: int, others: int, streams: int, hang_timeout_s: float) -> None:
    """`rounds` of a second kill right after a return from the first, `others` of each other second fault."""
    chance = random.Random(1)
    with served(report, "--hang-timeout-s", f"{hang_timeout_s:g}") as session:
        cases = undisturbed(session, streams, MAX_TOKENS)
        servers = Servers(session)
        with GreedyLoad(session.stack.base_url, cases, streams, deadline_s=300) as load:
            for (what, fault, turns), count in [(MAIN, rounds), *((other, others) for other in OTHERS)]:
                seconds = list(_repeat(servers, load, count, turns, fault, chance, what))
                _note(report, what, count, seconds)
        report.outcomes = load.outcomes
        numbers = tally(report.outcomes)
        failed = numbers.count("refused", "broken", "late")
        report.promise("no request failed", numbers.sent > 0 and failed == 0, f"{failed} of {numbers.sent}")
        promise_right(report, report.outcomes)
        report.promise("ready at the end", wait_for(session.ready, 30))


def _repeat(
    servers: Servers,
    load: GreedyLoad,
    count: int,
    turns: Sequence[tuple[int, ...]],
    fault: Fault,
    chance: random.Random,
    what: str,
) -> Iterator[float]:
    """Yields the seconds from each second fault to the next right answer; ends early when there is none."""
    for number in range(count):
        fault(servers, turns[number % len(turns)], chance)
        moment = time.monotonic()
        servers.session.report.inject(what)
        again_s = serves_again(load, moment, BACK_S)
        if again_s is None or servers.session.stack.process.poll() is not None:
            return
        yield again_s


def _note(report: Report, what: str, count: int, seconds: Sequence[float]) -> None:
    report.promise(f"{what}: served again each time", len(seconds) == count, f"{len(seconds)} of {count}")
    if seconds:
        times = [round(value, 1) for value in (statistics.median(seconds), max(seconds))]
        report.facts[f"{what}: seconds to the next right answer, median and most"] = times
