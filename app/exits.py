"""How a command, or a process of the system, ends: its status, and what went wrong in one line.

Loads nothing of the command line's own libraries, nor of any service: see `moebius/__main__.py`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from moebius.errors import (
    USER_ERROR_EXIT,
    ConfigErrors,
    EngineLost,
    ProcessFailed,
    UserError,
    report_failure,
)

# Errors of other packages that are about what the user gave. By name: importing them here would load the
# packages, and an error whose module is not loaded cannot have been raised.
USER_ERRORS = (
    ("moebius.checkpoint.errors", "CheckpointError"),
    ("app.demo_model.download", "DemoModelError"),
    ("moebius.mailbox", "MailboxError"),
)
# Signals that end a process without a handler, and let a command clean up here.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals that follow the first one this soon came along with it (a terminal's Ctrl-C and a parent that passes
# it on): they must not break off what the first one made the command clean up.
TOGETHER_S = 0.5


# An error this soon after a signal comes from what the signal broke off.
CONSEQUENCE_S = 2.0
# As shells give it for a program that SIGPIPE has ended.
BROKEN_PIPE_EXIT = 128 + signal.SIGPIPE


class EndingSignals:
    """Turns the signals that end a process into exceptions, so that a command removes what it has made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The latest signal, and when it came; 0: none has.
        self.number = 0
        self._at = 0.0

    @property
    def status(self) -> int:
        """The exit status, as shells give it for a command that a signal has ended."""
        return 128 + self.number

    def explains(self, error: BaseException) -> bool:
        """Whether the error is no defect, but what became of the code that a signal has left."""
        if not self.number:
            return False
        seen: BaseException | None = error
        while seen is not None and not isinstance(seen, KeyboardInterrupt | SystemExit):
            seen = seen.__cause__ or seen.__context__
        return seen is not None or self._clock() - self._at < CONSEQUENCE_S

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt for SIGINT, which a dialogue may survive, else SystemExit."""
        now = self._clock()
        if self.number and now - self._at < TOGETHER_S:
            return
        self.number, self._at = number, now
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.status)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handles signals in the main thread, where Python runs handlers; what is ignored (nohup) stays
        ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {number: signal.getsignal(number) for number in ENDING}
        own = [number for number, handler in earlier.items() if handler != signal.SIG_IGN]
        over = False

        def in_child() -> None:
            # A fork owns nothing of what this command cleans up, and its parent may end it at any moment.
            for number in () if over else own:
                signal.signal(number, signal.SIG_DFL)

        os.register_at_fork(after_in_child=in_child)
        try:
            for number in own:
                signal.signal(number, self.handle)
            yield
        finally:
            over = True
            for number in own:
                signal.signal(number, earlier[number])


def exit_with(run: Callable[[], object]) -> NoReturn:
    """Runs it and exits with the status that it returns, or that its error or a signal stands for."""
    signals, status = EndingSignals(), None
    ends_at_once = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")  # a locale without an answer's letters: question marks
    try:
        with signals.handled():
            status = run()
    except (KeyboardInterrupt, SystemExit, Exception) as error:
        status = signals.status if signals.explains(error) else _status_of(error)
        ends_at_once = isinstance(error, EngineLost)
    unwritten = _flush_error()
    if unwritten is not None and not signals.number:
        status = _status_of_unwritten(unwritten, status)
    if ends_at_once:
        # What a lost device holds aborts the process when it is freed.
        os._exit(status if isinstance(status, int) else 1)
    sys.exit(status if isinstance(status, int) else 0)


def _status_of(error: BaseException) -> object:
    """Returns the exit status that an error stands for, after it was reported.

    Raises the error if it is a defect.
    """
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    # The command line's library exits by itself when a pipe breaks, which may be one that is not ours.
    broken = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(broken, BrokenPipeError):
        if not _is_unread():
            raise broken
        return BROKEN_PIPE_EXIT
    if isinstance(error, SystemExit):
        return error.code
    assert isinstance(error, Exception)
    message = _user_message(error)
    if message is None:
        raise error
    if isinstance(error, ProcessFailed):
        with contextlib.suppress(OSError, ValueError):
            print(f"moebius: {error}", file=sys.stderr)
    elif isinstance(error, ConfigErrors):
        with contextlib.suppress(OSError, ValueError):
            print(*(f"  {line}" for line in error.details), sep="\n", file=sys.stderr)
        report_failure(error.summary)
    else:
        report_failure(message)
    return getattr(error, "exit_status", USER_ERROR_EXIT)


def _is_unread() -> bool:
    """Returns whether what this process prints has no reader: a pipe whose other end is closed, a closed
    terminal, or what rich puts in place of such a pipe.
    """
    if os.path.samestat(os.fstat(1), os.stat(os.devnull)):
        return True
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _status_of_unwritten(error: Exception, status: object) -> object:
    """Returns the status of a command whose last output could not be written; says why, unless an earlier
    line has met it.
    """
    said = _lacking(error) if isinstance(error, OSError) else None
    if said is None:
        return BROKEN_PIPE_EXIT
    if not status:
        report_failure(said)
    return status or USER_ERROR_EXIT


def _flush_error() -> Exception | None:
    """Returns why the rest of the output could not be written, as in `moebius topology | head -1`; None: it
    was. What is left is dropped, since Python would complain of it at its end.
    """
    found: Exception | None = None
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # `>&-`: closed by the caller
            continue
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            found = found or error
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return found


def _user_message(error: Exception) -> str | None:
    """One line for an error the user can fix; None for a defect."""
    # Typer's usage errors (no such option, missing argument) share this method and nothing public.
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        from app.option_hints import unknown_command, unknown_option

        if (message := unknown_option(error)) is not None:
            return message
        plain = " ".join(str(format_message()).split())
        path = getattr(getattr(error, "ctx", None), "command_path", "moebius")
        return unknown_command(plain, path) or plain
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torch":
        return "this needs torch, which is not installed for this Python: `make setup` or `pip install torch`"
    if isinstance(error, RuntimeError) and str(error).startswith("Could not determine home directory"):
        return "a path begins with ~, but that home directory is not known: give the whole path, or set HOME"
    if isinstance(error, MemoryError):
        return "MemoryError: there is not enough memory"
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return str(error)
    if isinstance(error, OSError) and (said := _lacking(error)) is not None:
        return said
    kinds: list[type[BaseException]] = [UserError]
    for module, name in USER_ERRORS:
        if module in sys.modules:
            kinds.append(getattr(sys.modules[module], name))
    if isinstance(error, tuple(kinds)):
        return " ".join(str(error).split())
    return None


def _lacking(error: OSError) -> str | None:
    """What the system has run out of, whichever line met it; None for all other errors."""
    where = f": {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no room left to write{where or ' the output'} ({error.strerror})"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}{where}: raise `ulimit -n`"
    if error.errno == errno.ENOMEM:
        return f"{error.strerror}{where}"
    if isinstance(error, FileNotFoundError) and not error.filename:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory was deleted: change to another one"
    return None
