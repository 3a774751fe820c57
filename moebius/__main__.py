"""`python -m moebius`: the same as the `moebius` command.

An expert server that `moebius serve` starts goes past the command line, whose libraries take a third of the
time until a server that was killed answers again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from moebius.app.exits import exit_with


def direct(arguments: Sequence[str]) -> Callable[[], object] | None:
    """What `expert --config FILE` runs, for settings that name the model in full, as the supervisor's do."""
    if len(arguments) != 3 or tuple(arguments[:2]) != ("expert", "--config"):
        return None

    def run() -> object:
        from moebius.config_loader import load_config

        config = load_config(arguments[2], {})
        if not config.model.model.startswith("/"):
            from moebius.app.cli import main

            main(list(arguments))
        from expert_service.main import run as run_expert

        return run_expert(config)

    return run


def main() -> None:
    """Runs what the process's arguments say, and exits."""
    run = direct(sys.argv[1:])
    if run is not None:
        exit_with(run)
    from moebius.app.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
