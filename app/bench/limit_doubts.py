"""When the memory bandwidth of this machine is no limit of a server, and what is said of it then."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from app.bench.limits import cache_bytes
from moebius.network.web_origins import LOOPBACK_HOSTS


def limit_doubts(
    url: str, step_bytes: float, ratios: Sequence[float], cached_bytes: int | None = None
) -> list[str]:
    """Returns why a limit by memory bandwidth says nothing, a sentence each; none: it may be meant.

    Args:
        url: Of the server.
        step_bytes: Bytes of weights that a decode step of one stream reads.
        ratios: What was measured, each divided by its limit; none before anything was.
        cached_bytes: Size of this machine's last-level caches; None: of the CPUs that this process may use.
    """
    found = []
    if cached_bytes is None:
        cached_bytes = cache_bytes(sorted(os.sched_getaffinity(0)))
    host = urlsplit(url).hostname or ""
    if host not in LOOPBACK_HOSTS:
        found.append(
            f"the limit is this machine's memory bandwidth, and the server may be on another one ({host})"
        )
    if step_bytes < cached_bytes:
        found.append(
            f"a step reads {step_bytes / 1e6:.1f} MB of weights, which the CPUs' caches hold: memory "
            "bandwidth is no limit of it"
        )
    if ratios and max(ratios) > 1:
        found.append(
            f"{max(ratios):.2f} of the limit was measured: weights are read from a GPU's memory or from "
            "caches, or draft tokens were accepted, so that this machine's memory bandwidth is no limit"
        )
    return found


def print_doubts(url: str, step_bytes: float, ratios: Sequence[float]) -> None:
    """Prints them on stderr, a line each, after the table that they are about."""
    for doubt in limit_doubts(url, step_bytes, ratios):
        print(f"the limit means little: {doubt}", file=sys.stderr, flush=True)
