"""Errors that a user caused and can fix: the CLI prints them as one line, without a traceback."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from collections.abc import Sequence

USER_ERROR_EXIT = 2
"""Exit status of every command and process that ended because of such an error."""

PEER_LOST_EXIT = 75
"""Exit status of an engine process that ended because another rank of its group did (EX_TEMPFAIL)."""

WRONG_IDENTITY_EXIT = 78
"""Exit status of a process that would compute another model, or other parts of it, than those it has to work
with (EX_CONFIG). Starting it again does not help: files or settings have changed since the others started."""

FAILURE_MARK = "moebius: error: "
"""What the last line of a process that could not start begins with."""


# How the kernel, Python, C++ and torch say that they got no memory, or no thread, whose stack is memory.
_NO_MEMORY = re.compile(
    "allocate memory|out of memory|MemoryError|bad_alloc|start new thread|Resource temporarily unavailable",
    re.I,
)


def report_failure(cause: str) -> None:
    """Prints why this process ends, as one line on stderr: its last one, which the supervisor repeats."""
    with contextlib.suppress(OSError, ValueError):  # stderr is full, or closed: the status remains
        print(FAILURE_MARK + " ".join(cause.split()) + shortage(cause), file=sys.stderr, flush=True)


def shortage(cause: str) -> str:
    """Returns a note for a failure's message: which limit of the process may be behind it; empty: none."""
    if not _NO_MEMORY.search(cause):
        return ""
    limits = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA, "-u": resource.RLIMIT_NPROC}
    found = {option: resource.getrlimit(limit)[0] for option, limit in limits.items()}
    said = [f"ulimit {option} is {found[option] >> 20} MiB" for option in ("-v", "-d") if found[option] >= 0]
    if "thread" in cause and found["-u"] >= 0:
        said.append(f"ulimit -u is {found['-u']} threads and processes")
    return f"; {', '.join(said)}: raise what is too low" if said else ""


class UserError(Exception):
    """Something the user gave is wrong; the message names it and says what is allowed."""

    # Of a process that ends because of it.
    exit_status = USER_ERROR_EXIT


class ConfigError(UserError):
    """A setting is unknown, of the wrong type or out of range; the message names key, value and choices."""


class ConfigErrors(ConfigError):
    """Several settings are wrong. The message names all of them; `details` has a line for each, `summary` the
    line after those."""

    def __init__(self, details: Sequence[str], summary: str) -> None:
        super().__init__("; ".join((*details, summary)))
        self.details, self.summary = tuple(details), summary


def all_problems(problems: Sequence[str], summary: str = "") -> ConfigError:
    """Returns an error that names all of them, and `summary` if there is one."""
    if len(problems) == 1 and not summary:
        return ConfigError(problems[0])
    return ConfigErrors(problems, summary or f"{len(problems)} settings are not allowed")


class StartupError(UserError):
    """A process of the system did not become ready; the message names it and repeats its last words."""


class ProcessFailed(StartupError):
    """A process that the supervisor started could not start; the message is complete, of a line or two."""


class WrongIdentity(UserError):
    """A process does not fit those it has to work with; the message says which part differs."""

    exit_status = WRONG_IDENTITY_EXIT


class EngineLost(UserError):
    """The engine of a command was lost, with its device for example; the message says why.

    Nothing that it holds on the device can be freed, so the command ends without trying to.
    """

    exit_status = 1


def brief(error: BaseException) -> str:
    """Returns type and first line, for a log: compilers write pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
