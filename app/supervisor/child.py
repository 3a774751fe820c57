"""Becomes a child program that cannot outlive the supervisor: `python -I -S child.py PARENT CPUS PROGRAM…`.

PR_SET_PDEATHSIG has to be set by the child itself and survives `exec`. Doing it here, in a program of its
own, keeps Python code out of the moment between fork and exec, where a process with threads (gRPC's,
the log forwarders) may deadlock. Runs without the project's packages, so it starts in a few ms.
"""

import ctypes
import os
import signal
import sys

# <sys/prctl.h>
PR_SET_PDEATHSIG = 1


def tie_to_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends; exits when it has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # The parent may have died before prctl took effect; then no signal will ever come.
    if os.getppid() != parent:
        sys.exit("the supervisor is gone")


def main(arguments: list[str]) -> None:
    """Ties this process to PARENT, restricts it to CPUS (comma separated, `-` for all), becomes PROGRAM."""
    parent, cpus, program = int(arguments[0]), arguments[1], arguments[2:]
    tie_to_parent(parent)
    if cpus != "-":
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
