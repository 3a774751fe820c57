"""Runs a plan: starts the processes, waits until they are ready, restarts the dead, stops all in order.

Processes that only work together: when one ends all do, and they start again together.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Literal

import structlog

from app.supervisor.early import EarlyChildren
from app.supervisor.health import Plan, Timing
from app.supervisor.kept_lines import KeptLines
from app.supervisor.process import ManagedProcess
from app.supervisor.runfile import RunDirectory, unusable, write_private
from app.supervisor.weight_files import WeightFiles
from moebius.errors import PEER_LOST_EXIT, ProcessFailed, StartupError
from moebius.process.wakeup import Wakeup

# The others notice the death by themselves and say which of them it was; then they have this long to end.
GROUP_GRACE_S = 5.0


class RestartGroup:
    """Members are never restarted while one of the former ones still runs."""

    def __init__(self, members: Sequence[ManagedProcess]) -> None:
        self._members = list(members)
        # Time after which members that still run are killed; None: the group is up.
        self._deadline: float | None = None
        # Members that have not been started again since the group went down.
        self._due: set[str] = set()

    def note_death(self, now: float) -> None:
        """A member has ended."""
        if self._deadline is None:
            self._deadline = now + GROUP_GRACE_S

    def enforce(self, now: float) -> None:
        """Kills members that outlive another one for too long; they are seen to have ended afterwards."""
        if self._deadline is not None and now > self._deadline:
            for member in self._members:
                if member.pid is not None:
                    member.send_kill()

    def may_restart(self, name: str) -> bool:
        """Returns whether this member, which has ended, may start now; the caller then calls `note_start`."""
        if self._deadline is not None and all(member.noted_exit for member in self._members):
            self._deadline = None
            self._due = {member.spec.name for member in self._members}
        return self._deadline is None and name in self._due

    def note_start(self, name: str) -> None:
        """A member was started again."""
        self._due.discard(name)


POLL_S = 0.05
# How long a process that ended because of another one is kept from being blamed.
CULPRIT_WAIT_S = 2.0
# Two signals that follow one another closely may arrive as one.
HURRY_AFTER_S = 0.5
State = Literal["starting", "ready", "died", "stopped"]
EventCallback = Callable[[str, State], None]
"""Called as `callback(process_name, state)` from the main thread."""
LineCallback = Callable[[str, str], None]
"""Called as `callback(process_name, line)` from other threads, during a start."""
WaitingCallback = Callable[[Mapping[str, str]], None]
"""Called often from the main thread during a start: what processes that are not ready do; "": not said."""

log = structlog.get_logger(__name__)


class Supervisor:
    """Runs one plan. Use from the main thread, as a context manager: leaving it stops everything.

    SIGTERM, SIGINT and SIGHUP end `wait_ready` and `run`; a second one kills without grace. A SIGHUP that was
    ignored before, as under nohup, stays ignored, here and in the processes.
    """

    def __init__(
        self,
        plan: Plan,
        timing: Timing,
        on_event: EventCallback | None = None,
        on_waiting: WaitingCallback | None = None,
        on_line: LineCallback | None = None,
        early: EarlyChildren | None = None,
    ) -> None:
        """`early` has what the first start takes processes from.

        With `on_waiting`, what processes say of their progress is shown there and not forwarded.

        With `on_line`, what they print until the end of the start goes there instead of to our stderr.
        """
        self._plan, self._timing = plan, timing
        self._on_event = on_event or (lambda name, state: None)
        self._on_waiting, self._on_line = on_waiting, on_line
        self._directory = RunDirectory(plan.directory)
        self._segments: list[object] = []
        self._kept: KeptLines | None = None
        self._weights: WeightFiles | None = None
        self._prefixes: WeightFiles | None = None
        self._signals_seen = 0
        # The first signal that asked for the end; 0: none did.
        self.ended_by = 0
        self._wake = Wakeup()
        self._previous_handlers: dict[int, object] = {}
        self.processes = [
            ManagedProcess(spec, timing, plan.json_logs, early=early) for spec in plan.processes
        ]
        self._groups = {
            name: RestartGroup([process for process in self.processes if process.spec.group == name])
            for name in {spec.group for spec in plan.processes if spec.group}
        }
        self._first_exit_at: float | None = None

    @property
    def stopping(self) -> bool:
        """Returns whether a signal asked for the end."""
        return self._signals_seen > 0

    def __enter__(self) -> Supervisor:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as ending:  # each of these is done, whatever becomes of those before it
            for number, handler in self._previous_handlers.items():
                ending.callback(signal.signal, number, handler)  # type: ignore[arg-type]
            ending.callback(self._directory.remove)
            for memory in (self._weights, self._prefixes):
                if memory is not None:
                    ending.callback(memory.close)
            ending.callback(self._segments.clear)
            ending.callback(self._end_kept)
            ending.callback(self._kill_rest)
            self._stop()

    def silence_events(self) -> None:
        """Stops all callbacks: the display of the start-up has seen its end."""
        self._on_event = lambda name, state: None
        self._on_waiting = None
        for process in self.processes:
            process.withholds_progress = False
            process.on_line = None

    def wait_ready(self) -> bool:
        """Blocks until every process is ready; False when a signal came first.

        Raises StartupError when a process ends or hangs before it is ready, or the time is over: a restart
        would only repeat, more slowly, an error that the user has to fix.
        """
        end = time.monotonic() + self._timing.ready_timeout_s
        while not self.stopping:
            self._restart_lost()
            self._refuse_exits()
            self._refuse_hangs()
            for process in self.processes:
                if process.check_ready():
                    self._on_event(process.spec.name, "ready")
            if all(process.ready for process in self.processes):
                return True
            if self._on_waiting is not None:
                self._on_waiting(
                    {process.spec.name: process.progress for process in self.processes if not process.ready}
                )
            if time.monotonic() > end:
                late = ", ".join(process.spec.name for process in self.processes if not process.ready)
                limit = f"{self._timing.ready_timeout_s:g} s (ready_timeout_s)"
                raise StartupError(f"not ready within {limit}: {late}")
            self._pause()
        return False

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Watches and restarts the processes until a signal comes or `until()` is true.

        Raises StartupError when a process cannot be brought back: without it no request is answered, and
        the user has to act.
        """
        while not self.stopping and not until():
            now = time.monotonic()
            for process in self.processes:
                self._watch(process, now)
            self._pause()

    def _start(self) -> None:
        self._record()
        for path, text in self._plan.files:
            write_private(path, text)
        kept = self._keep_lines()
        # Held, not only created: a segment counts as stale once no living process maps it.
        self._segments = [segment.create() for segment in self._plan.segments]
        self._weights = WeightFiles(self._plan.weights)
        self._prefixes = WeightFiles(self._plan.prefixes)
        for process in self.processes:
            process.keep_line = kept.write
            process.withholds_progress = self._on_waiting is not None
            if self._on_line is not None:
                process.on_line = partial(self._on_line, process.spec.name)
            process.start()
            self._record()
            self._on_event(process.spec.name, "starting")

    def _keep_lines(self) -> KeptLines:
        """Returns what keeps the lines of the processes; our own are kept from here on."""
        try:
            self._kept = KeptLines(self._plan.directory, self._plan.json_logs)
        except OSError as error:
            raise unusable(self._plan.directory, error) from None
        root = logging.getLogger()
        self._kept.setFormatter(next((handler.formatter for handler in root.handlers), None))
        root.addHandler(self._kept)
        return self._kept

    def _end_kept(self) -> None:
        if self._kept is not None:
            logging.getLogger().removeHandler(self._kept)
            self._kept.close()

    def _restart_lost(self) -> None:
        """Starts a process again that had been ready and ended, while others still load: that may take many
        minutes, and it is back in one second. Once each; those of a group start together or not at all.
        """
        now = time.monotonic()
        for process in self.processes:
            if process.spec.group:
                continue
            if process.ready and process.exit_code is not None and process.restarts == 0:
                self._note_exit(process, now)
            else:
                self._restart_if_due(process, now)

    def _refuse_exits(self) -> None:
        """Raises StartupError for a process that has ended; those that only follow another one come last."""
        ended = [process for process in self.processes if process.exit_code is not None]
        if not ended:
            return
        culprits = [process for process in ended if process.exit_code != PEER_LOST_EXIT]
        now = time.monotonic()
        self._first_exit_at = self._first_exit_at or now
        if not culprits and now < self._first_exit_at + CULPRIT_WAIT_S:
            return
        blamed = (culprits or ended)[0]
        raise ProcessFailed(_start_failure(blamed))

    def _refuse_hangs(self) -> None:
        """Raises StartupError for a process that hangs, which is more than being late."""
        now = time.monotonic()
        for process in self.processes:
            hang = process.hang(now)
            if hang is not None:
                raise StartupError(f"{process.spec.name} (pid {process.pid}) hangs: {hang}")

    def _watch(self, process: ManagedProcess, now: float) -> None:
        """One look at one process: note its death, restart it, or see that it is ready again."""
        name = process.spec.name
        group = self._groups.get(process.spec.group)
        if group is not None:
            group.enforce(now)
        code, hang = process.exit_code, process.hang(now)
        if code is not None:
            if group is not None:
                group.note_death(now)
            self._note_exit(process, now)
        elif hang is not None:
            process.kill_for(hang)
        elif (group is None or group.may_restart(name)) and self._restart_if_due(process, now):
            if group is not None:
                group.note_start(name)
        elif process.check_ready():
            log.info("process ready", name=name, restarts=process.restarts)
            self._on_event(name, "ready")

    def _restart_if_due(self, process: ManagedProcess, now: float) -> bool:
        """Starts a process again whose pause is over; True when it did."""
        if not process.restart_if_due(now):
            return False
        self._update_record()
        self._on_event(process.spec.name, "starting")
        return True

    def _note_exit(self, process: ManagedProcess, now: float) -> None:
        """Plans a restart and says so in one line, or gives up."""
        name, pid, hang, how = process.spec.name, process.last_pid, process.killed_for, process.ending
        pause = process.note_exit(now)
        if process.can_not_heal:
            raise StartupError(
                f"{name} cannot be started again ({how}): {process.last_words}; "
                "fix that and start `moebius serve` again"
            )
        pause_s = round(pause, 3)
        if hang is not None:
            silent_s = round(hang.silent_s, 1)
            log.warning(
                "process hung; killed it, restarting",
                name=name,
                pid=pid,
                silent_s=silent_s,
                why=hang.evidence,
                pause_s=pause_s,
            )
        else:
            said = {"why": process.cause} if process.cause else {}
            log.warning("process ended; restarting", name=name, how=how, pause_s=pause_s, **said)
        self._update_record()
        self._on_event(name, "died")

    def _stop(self) -> None:
        """Stops stage after stage: SIGTERM, grace, SIGKILL. Afterwards no process is left."""
        for stage in sorted({process.spec.stop_stage for process in self.processes}):
            members = [process for process in self.processes if process.spec.stop_stage == stage]
            self._await_leader(members)
            for process in members:
                process.terminate()
            begin, hurried = time.monotonic(), False
            while any(process.pid is not None for process in members):
                age_s = time.monotonic() - begin
                if age_s > self._timing.stop_timeout_s or self._signals_seen > 1:
                    break
                if not hurried and age_s > HURRY_AFTER_S and self._is_incomplete(stage):
                    hurried = True
                    for process in members:
                        process.terminate()
                self._pause()
            for process in members:
                if process.pid is not None:
                    log.warning("process did not stop in time; killing it", name=process.spec.name)
                if not process.kill():
                    log.error("process does not end, it waits inside the kernel", name=process.spec.name)
                if process.last_pid is not None:
                    # Our output may be what has failed (a pipe without a reader, a full disk).
                    with contextlib.suppress(OSError, ValueError):
                        self._on_event(process.spec.name, "stopped")

    def _kill_rest(self) -> None:
        """Those that still run when stopping was broken off: what they use is about to go."""
        for process in self.processes:
            if process.pid is not None:
                process.kill()

    def _await_leader(self, members: Sequence[ManagedProcess]) -> None:
        """Waits while those that a leader on another host ends still run; a second signal, or its end,
        hurries.
        """
        end = time.monotonic() + self._timing.stop_timeout_s
        while time.monotonic() < end and self._signals_seen < 2:
            led = [process for process in members if process.spec.ends_with_leader]
            if not led or any(process.pid is None for process in led):
                return
            self._pause()

    def _update_record(self) -> None:
        """Writes the record; while serving, a directory without room is no reason to end."""
        try:
            self._record()
        except StartupError as error:
            log.error("run file is out of date", error=str(error))

    def _is_incomplete(self, stage: int) -> bool:
        """Returns whether a process that members of this stage work through is gone: it is not restarted now,
        so what still runs cannot end well, and a second SIGTERM tells them not to wait for it.
        """
        return any(process.spec.stop_stage > stage and process.pid is None for process in self.processes)

    def _record(self) -> None:
        running = [(process.spec.name, process.pid) for process in self.processes if process.pid is not None]
        self._directory.record(
            ((name, pid) for name, pid in running if pid is not None),
            (segment.name for segment in self._plan.segments),
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals_seen += 1
        self.ended_by = self.ended_by or number
        self._wake.set()

    def _pause(self) -> None:
        self._wake.wait(POLL_S)
        self._wake.clear()


def _start_failure(process: ManagedProcess) -> str:
    """Returns the cause first, then where to look; the processes that did start are stopped by now."""
    words = process.last_words
    name, lines = process.spec.name, f"the lines of {process.spec.name!r} above"
    if process.cause:
        return f"{name} could not start: {words}\n  Fix that and start again; {lines} say how far it came."
    return f"{name} could not start: {process.ending}, after it logged: {words}\n  See {lines}."
