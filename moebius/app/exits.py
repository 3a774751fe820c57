"""How a command, or a process of the system, ends: its status, and what went wrong in one line.

Loads nothing of the command line's own libraries, nor of any service: see `moebius/__main__.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from moebius.errors import USER_ERROR_EXIT, ProcessFailed, UserError, report_failure

# Errors of other packages that are about what the user gave. By name: importing them here would load the
# packages, and an error whose module is not loaded can not have been raised.
USER_ERRORS = (
    ("moebius.checkpoint.errors", "CheckpointError"),
    ("moebius.app.demo_model.download", "DemoModelError"),
    ("moebius.mailbox", "MailboxError"),
)


def exit_with(run: Callable[[], object]) -> NoReturn:
    """Runs it and exits with the status that it returns, or that its error stands for."""
    try:
        status = run()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        # The reader of our output has gone (`moebius topology | head`); nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        message = _user_message(error)
        if message is None:
            raise
        if isinstance(error, ProcessFailed):
            print(f"moebius: {error}", file=sys.stderr)
        else:
            report_failure(message)
        status = getattr(error, "exit_status", USER_ERROR_EXIT)
    sys.exit(status if isinstance(status, int) else 0)


def _user_message(error: Exception) -> str | None:
    """One line for an error the user can mend; None for a defect."""
    # Typer's usage errors (no such option, missing argument) share this method and nothing public.
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        from moebius.app.option_hints import unknown_option

        if (message := unknown_option(error)) is not None:
            return message
        return " ".join(str(format_message()).split())
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torch":
        return "this needs torch, which is not installed for this Python: `make setup` or `pip install torch`"
    kinds: list[type[BaseException]] = [UserError]
    for module, name in USER_ERRORS:
        if module in sys.modules:
            kinds.append(getattr(sys.modules[module], name))
    if isinstance(error, tuple(kinds)):
        return " ".join(str(error).split())
    return None
