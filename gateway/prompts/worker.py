"""A process that prepares requests, one at a time, within a bound on memory and on processor time.

It is a fork of the process that this module starts as, and gets a `WorkerSetup` and then requests over a
socket. What
a template, a tokenizer or a parser does cannot be interrupted from within, so the limits are the kernel's:
allocations beyond the bound fail, and a request that takes too long ends the process by SIGPROF. The
gateway starts another.
"""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import re
import resource
import signal
import socket
import sys
from pathlib import Path

from gateway.constraints.response_format import GrammarTakesLong, check_with
from gateway.generation.model import load_served_model
from gateway.prompts.fork_server import serve_forks
from gateway.prompts.prepare import Preparer
from gateway.prompts.process import (
    HEADER,
    READY,
    Answer,
    ModelFiles,
    OtherFiles,
    Postponed,
    WorkerSetup,
    packed_answer,
    too_much_memory,
)
from gateway.text.model_files import read_tokenizer
from gateway.text.tokenizer import Tokenizer
from moebius.errors import WRONG_IDENTITY_EXIT
from moebius.grammar.compile import GrammarError, OverBudget
from moebius.grammar.process import MOST_S, QUICK_S, TOO_SLOW, GrammarProcess
from moebius.models.identity import changes, text_parts
from moebius.process.garbage import collect_rarely
from moebius.process.memory import give_back_memory
from protos import engine_pb2
from protos.engine_pb2 import Constraint

OUT_OF_MEMORY = 3  # exit code
COMMAND = "moebius-prompts"  # as `ps -o comm` shows it, however the process came about
_BUFFER = 2**17  # bytes
_GROWTH = 2**28  # bytes; a process that grew by more is replaced
_LEAST_S = 0.005  # processor time: shorter limits are below the timer's resolution
_OOM_SCORE = "500"  # out of memory, the kernel kills this process before the engine


def _received(incoming: io.BufferedReader[socket.SocketIO], size: int) -> bytearray | None:
    """Returns exactly `size` bytes; None when the gateway is gone."""
    data = bytearray(size)
    return data if incoming.readinto(data) == size else None


def _message(incoming: io.BufferedReader[socket.SocketIO]) -> bytearray | None:
    """Returns the next message without its header; None when the gateway is gone."""
    header = _received(incoming, HEADER.size)
    return None if header is None else _received(incoming, HEADER.unpack(header)[0])


def _used(what: str) -> int:
    """Returns a size from /proc/self/status, bytes."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status lacks {what}"
    return int(found.group(1)) * 1024


class _Grammars:
    """Compiles a request's grammars within a common limit of time."""

    def __init__(self) -> None:
        self._process = GrammarProcess(forks=True)
        self._process.start()
        self._is_patient = False
        self._end_s = 0.0  # of the process's processor time

    def begin(self, is_patient: bool) -> None:
        """Starts the time of a request's grammars; `is_patient`: no urgent request waits for it."""
        self._is_patient = is_patient
        self._process.spent_s = 0.0
        self._end_s = MOST_S if is_patient else QUICK_S

    def compiled(self, constraint: Constraint) -> str:
        """Returns the compiled grammar. Raises GrammarError if it cannot be enforced, GrammarTakesLong if
        compiling takes too long while others may wait."""
        left = self._end_s - self._process.spent_s
        try:
            if left < _LEAST_S:
                raise OverBudget(TOO_SLOW)
            return self._process.compiled(constraint, left)
        except OverBudget as error:
            if not self._is_patient:
                raise GrammarTakesLong from None
            if left == MOST_S:  # more time is never allowed
                raise GrammarError(str(error)) from None
            raise


def _prepare_all(
    channel: socket.socket,
    incoming: io.BufferedReader[socket.SocketIO],
    setup: WorkerSetup,
    tokenizer: Tokenizer,
) -> None:
    """Answers requests until the gateway is gone or this process has grown."""
    info = engine_pb2.GetModelInfoResponse.FromString(setup.model_info)
    model = load_served_model(info, tokenizer, setup.served_name, setup.aliases, setup.parsers)
    grammars = _Grammars()
    check_with(grammars.compiled)
    preparer = Preparer(model, setup.images, setup.max_body_bytes, setup.strict_parameters, setup.responses)
    most = _used("VmData") + setup.memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    collect_rarely()
    at_start = _used("VmRSS")
    channel.sendall(b"".join(packed_answer(READY)))
    while (data := _message(incoming)) is not None:
        answers: list[Answer] = []
        for kind, size, is_patient, owner in pickle.loads(data):
            grammars.begin(is_patient)
            body = _received(incoming, size)
            if body is None:
                return
            signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
            try:
                answers.append(preparer.answer(kind, body, owner))
            except GrammarTakesLong:
                answers.append(Postponed())
            except MemoryError:
                answers.append(too_much_memory(setup))
            del body
        leaving = _has_grown(at_start)
        reply = packed_answer((answers, leaving))
        signal.setitimer(signal.ITIMER_PROF, 0)
        for piece in reply:
            channel.sendall(piece)
        del answers, reply
        if leaving:
            return


def _has_grown(at_start: int) -> bool:
    """Returns whether memory has grown much since the start; nearly free while the peak is low."""
    most = at_start + _GROWTH
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > most and _used("VmRSS") > most


def _read_files(files: ModelFiles) -> Tokenizer | OtherFiles:
    """Returns the tokenizer, of the files that the gateway has read."""
    tokenizer = None
    if not _changes(files):  # fast; and files that are half written may not be readable
        tokenizer = read_tokenizer(files.tokenizer_dir, files.template_file, files.parts)
        _ = tokenizer.text_size  # now, not at the first request's expense
    # Checked again: the files that were read are the present ones, unless they are written at this moment.
    changed = _changes(files)
    return OtherFiles(changed) if changed or tokenizer is None else tokenizer


def _changes(files: ModelFiles) -> str:
    return changes(files.parts, text_parts(files.tokenizer_dir, files.template_file)) if files.parts else ""


def _run(channel: socket.socket, files: ModelFiles, read: Tokenizer | OtherFiles) -> int:
    """Serves one process's channel until the gateway closes it. Returns the exit code.

    `read`: what the process has that this one is a fork of.
    """
    # Large enough that a small request takes one system call.
    incoming = io.BufferedReader(socket.SocketIO(channel, "r"), _BUFFER)
    try:
        if isinstance(read, OtherFiles):
            read = _read_files(files)
        elif changed := _changes(files):
            read = OtherFiles(changed)
        # Waits for as long as the engine loads.
        data = _message(incoming)
        if data is None:
            return 0
        if isinstance(read, OtherFiles):
            channel.sendall(b"".join(packed_answer(read)))
            return WRONG_IDENTITY_EXIT
        _prepare_all(channel, incoming, pickle.loads(data), read)
    except MemoryError:
        return OUT_OF_MEMORY
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the gateway is gone
    return 0


def main(control: socket.socket) -> int:
    """Forks processes until the gateway closes the socket. Returns the exit code."""
    Path("/proc/self/comm").write_text(COMMAND)
    for number in (signal.SIGINT, signal.SIGTERM):  # for the gateway, which may still need this process
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    # Not buffered: what follows comes with sockets.
    data = _message(io.BufferedReader(socket.SocketIO(control, "r"), 1))
    if data is None:
        return 0
    files: ModelFiles = pickle.loads(data)
    read = _read_files(files)
    # Collections would write to pages that the forks share; one now would find nothing, in 0.1 s.
    gc.freeze()
    give_back_memory()
    serve_forks(control, lambda channel: _run(channel, files, read))
    return 0


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=0)))
