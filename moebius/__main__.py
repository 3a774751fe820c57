"""`python -m moebius`: the same as the `moebius` command.

Services that `moebius serve` starts go past the command line, whose libraries and many options take a third
of the time until a process that was killed answers again.
"""

from __future__ import annotations

# As little as can be: until `main` has run, Python answers a Ctrl-C with a traceback.
import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moebius.config import MoebiusConfig


# New objects until a command looks for garbage; Python's own 700 is for programs that make little.
_YOUNG_OBJECTS = 50_000


def direct(arguments: Sequence[str]) -> Callable[[], object] | None:
    """Returns what `expert|gateway|gpu --config FILE` runs, for settings that name the model in full, as the
    supervisor's do; None for everything else.
    """
    if len(arguments) != 3 or arguments[0] not in ("expert", "gateway", "gpu") or arguments[1] != "--config":
        return None

    def run() -> object:
        # An eighth of the time that the imports of an engine take; services switch it on when they are done.
        gc.disable()
        from moebius.config.loader import load_config
        from moebius.process.limits import check_limits

        check_limits(arguments[0])  # type: ignore[arg-type]  # one of its three
        config = load_config(arguments[2], {})
        if not _is_complete(config):
            from app.cli import main

            gc.enable()
            main(list(arguments))
        from app.services import service

        return service(arguments[0])(config)  # type: ignore[arg-type]  # one of its three

    return run


def _is_complete(config: MoebiusConfig) -> bool:
    """Whether the command line would find nothing to add to the model, nor to say against it."""
    model, head = config.model.model, config.gpu.speculative_model
    if head and not os.path.isabs(head):
        return False
    return os.path.isabs(model) and (os.path.isfile(model) or os.path.isfile(f"{model}/config.json"))


def _open_closed_streams() -> None:
    """A stream that the caller has closed (`<&-`) reads and writes nothing, as /dev/null does: a
    file that is opened later must not become this process's output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest number that is free is that of the stream.
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))  # noqa: SIM115


def _import_lean() -> None:
    """Imports structlog without the packages that it takes where they are: a twelfth of a start's time.

    Its pretty tracebacks (rich, and what that takes in turn) are used by no renderer of ours; rich itself
    is imported by commands that print tables.
    """
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python spells a module that is not there
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


def main() -> None:
    """Runs what the process's arguments say, and exits."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        # Nothing is to be cleaned up while modules are imported, which takes half a second.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_closed_streams()
    # Of this process and of all that it starts: gRPC's library notes on stderr, below the level of errors,
    # every server that says goodbye. A level that a user has set stays.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    _import_lean()
    from app.exits import exit_with

    run = direct(sys.argv[1:])
    if run is not None:
        exit_with(run)
    # Imports and options leave no garbage: to look for it all the time takes a sixth of a `moebius serve`.
    gc.set_threshold(_YOUNG_OBJECTS)
    from app.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
