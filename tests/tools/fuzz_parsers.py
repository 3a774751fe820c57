"""Reads random outputs with every parser: none fails, and none depends on how its output is cut.

    .venv/bin/python -m tests.tools.fuzz_parsers --inputs 1000000

prints a line per 100 000 inputs, and of a failure the seed that draws it again (--seed N --inputs 1).
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback

import structlog

from tests.helpers.parser_streams import NAMES, check_spoilt


def main() -> int:
    """Runs the inputs; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first input; each next one has the next")
    settings = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    began = time.monotonic()
    for number in range(1, settings.inputs + 1):
        seed = settings.seed + number - 1
        name = NAMES[seed % len(NAMES)]
        try:
            check_spoilt(name, random.Random(seed))
        except Exception:
            traceback.print_exc()
            print(f"failed: --seed {seed} --inputs 1 ({name})")
            return 1
        if number % 100_000 == 0 or number == settings.inputs:
            print(f"{number} inputs without a failure, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
