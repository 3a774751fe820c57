"""A process that has read the libraries and the model's files, and is forked for each process for prompts.

A fork starts within milliseconds and shares that memory. The server has no threads, so that forking it is
safe; the gateway, which has some, gets each fork's exit status from it, over a socket of the fork's own.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial

_FORK = b"F"  # comes with two sockets: the new process's channel, and the one that its status goes to
_STATUS = struct.Struct("!i")
# Each process tokenises one text at a time, so threads do not help; and forks would not have them.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
_KILL_S = 5.0  # a server that has not ended a process by then is itself ended


class Fork:
    """A forked process, with the methods of a `Popen` that the gateway uses; made by `ForkServer.fork`."""

    def __init__(self, report: socket.socket, server: subprocess.Popen[bytes] | Child) -> None:
        self._report, self._server = report, server
        self._lock = threading.Lock()
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status if it has ended (negative: by that signal), else None."""
        if self._status is None:
            poll = select.poll()
            poll.register(self._report, select.POLLIN)
            if not poll.poll(0):
                return None
        return self.wait()

    def wait(self) -> int:
        """Waits for the end; returns the exit status, which is the server's where that has ended before."""
        with self._lock:
            if self._status is None:
                try:
                    data = self._report.recv(_STATUS.size)
                except TimeoutError:  # stopped, or it still reads files: another one may do better
                    self._server.kill()
                    data = b""
                self._status = _STATUS.unpack(data)[0] if data else self._server.wait()
                self._report.close()
            return self._status

    def kill(self) -> None:
        """Ends it at once; the server does so, which alone knows that the process id is still its own."""
        with contextlib.suppress(OSError):  # it has ended
            self._report.settimeout(_KILL_S)
            self._report.shutdown(socket.SHUT_WR)


class Child:
    """A process that this one has forked, with the methods of a `Popen` that `ForkServer` uses."""

    def __init__(self, process: int) -> None:
        self.pid = process
        self._lock = threading.Lock()
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status if it has ended (negative: by that signal), else None."""
        with self._lock:
            if self._status is None:
                process, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if process else None
            return self._status

    def wait(self) -> int:
        """Waits for the end; returns the exit status."""
        # Not with the lock: others may poll, or end the process, meanwhile.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """Ends it at once, unless it has ended."""
        with self._lock:
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)


class EarlyServer:
    """A server that is forked from the gateway itself, which has imported the same libraries.

    A gateway has threads as soon as it serves, so only the first server can come about like this; whatever
    takes its place is a program of its own.
    """

    def __init__(self, run: Callable[[socket.socket], int]) -> None:
        """Forks a process whose exit status `run` returns; it is called with the socket of `ForkServer`.

        Call it before there are threads, connections or event loops.
        """
        self.control, theirs = socket.socketpair()

        def become_server() -> None:
            self.control.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.update(_ENVIRONMENT)

        self.process = Child(_fork(become_server, run, theirs))


class ForkServer:
    """The gateway's side of the server. It ends with its last reference, or with the gateway."""

    def __init__(self, module: str, message: bytes, early: EarlyServer | None = None) -> None:
        """Starts `python -m module` with a socket as its standard input, on which it gets `message` and then
        serves by `serve_forks`; or has `early` do so. Raises OSError."""
        self._process: subprocess.Popen[bytes] | Child
        if early is not None:
            self._control, self._process = early.control, early.process
        else:
            self._control, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-P", "-m", module]
                environment = {**os.environ, **_ENVIRONMENT}
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        self._control.sendall(message)

    @property
    def ended(self) -> bool:
        """Returns whether another one has to be started."""
        return self._process.poll() is not None

    def fork(self) -> tuple[socket.socket, Fork]:
        """Returns the channel of a new process, and the process. Raises OSError when the server has ended."""
        channel, theirs = socket.socketpair()
        report, reported = socket.socketpair()
        with theirs, reported:
            try:
                socket.send_fds(self._control, [_FORK], [theirs.fileno(), reported.fileno()])
            except OSError:
                channel.close()
                report.close()
                raise
        return channel, Fork(report, self._process)

    def close(self) -> None:
        """Ends the server, and waits for that; its forks end as they would without it."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def serve_forks(control: socket.socket, run: Callable[[socket.socket], int]) -> None:
    """Forks a process whenever the gateway asks for one, until the gateway is gone.

    Args:
        control: where the gateway asks.
        run: what a process does with its channel; its result is the exit status.
    """
    reports: dict[int, socket.socket] = {}  # by process id
    waker, woken = socket.socketpair()
    for end in (waker, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector, waker, woken:
        selector.register(control, selectors.EVENT_READ)
        selector.register(waker, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    message, sockets, _, _ = socket.recv_fds(control, len(_FORK), 2)
                    if not message:
                        # Its socket is closed now, and forks may still end.
                        signal.set_wakeup_fd(-1)
                        return
                    channel, report = (socket.socket(fileno=number) for number in sockets)
                    inherited = [control, waker, woken, report, *reports.values()]
                    process = _fork(partial(_leave_server, inherited, selector), run, channel)
                    reports[process] = report
                    selector.register(report, selectors.EVENT_READ, process)
                elif key.fileobj is waker:
                    waker.recv(1024)
                elif key.data in reports:  # the gateway has closed it: the process is to end
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(key.fileobj)
            _report_ended(reports, selector)


def _fork(begin: Callable[[], None], run: Callable[[socket.socket], int], channel: socket.socket) -> int:
    """Returns the id of a new process: it calls `begin`, and ends with the status that `run` returns."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            begin()
            status = run(channel)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    channel.close()
    return process


def _leave_server(inherited: list[socket.socket], selector: selectors.BaseSelector) -> None:
    """Rids a fork of what is the server's own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    selector.close()
    for each in inherited:
        each.close()


def _report_ended(reports: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Sends the exit status of each process that has ended, for which the gateway may wait."""
    while reports:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        with reports.pop(process) as report:
            with contextlib.suppress(KeyError):  # it was killed, and is not listened to any more
                selector.unregister(report)
            with contextlib.suppress(OSError):  # the gateway is gone
                report.sendall(_STATUS.pack(os.waitstatus_to_exitcode(status)))
