"""The other ranks of an engine that runs in this very process, as in benchmarks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from moebius.config import MoebiusConfig
from moebius.config_loader import effective_config
from moebius.supervisor.cpus import usable_cpus
from moebius.supervisor.gpus import find_gpus
from moebius.supervisor.process import CHILD_PROGRAM
from moebius.supervisor.ranks import RankPlacement, place_ranks, rank_address, rank_settings


@contextlib.contextmanager
def started_followers(config: MoebiusConfig) -> Iterator[MoebiusConfig]:
    """Starts ranks 1 and up; yields the settings of rank 0, which the caller runs and closes within.

    They log to our standard error and end with rank 0; whoever does not is killed. Call it from the main
    thread. Raises ConfigError when there are more ranks than GPUs.
    """
    placements = place_ranks(config, find_gpus(), usable_cpus()[0])
    if len(placements) == 1:
        yield config
        return
    parallel = config.parallel.model_copy(update={"rank": 0, "rank_address": rank_address(config)})
    config = config.model_copy(update={"parallel": parallel})
    with tempfile.TemporaryDirectory(prefix="moebius-ranks-") as directory:
        followers = [_start(config, placed, Path(directory)) for placed in placements[1:]]
        try:
            yield rank_settings(config, placements[0])
        finally:
            _end(followers, config.supervisor.stop_timeout_s)


def _start(config: MoebiusConfig, placed: RankPlacement, directory: Path) -> subprocess.Popen[bytes]:
    settings = directory / f"{placed.name}.yaml"
    settings.touch(mode=0o600)
    settings.write_text(effective_config(rank_settings(config, placed)))
    cpus = ",".join(map(str, placed.cpus)) or "-"
    wrapper = [sys.executable, "-I", "-S", CHILD_PROGRAM, str(os.getpid()), cpus]
    command = [sys.executable, "-m", "moebius", "gpu", "--config", str(settings), "--no-show-config"]
    return subprocess.Popen([*wrapper, *command], stdin=subprocess.DEVNULL)


def _end(followers: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    for follower in followers:
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
            follower.wait(max(0.0, end - time.monotonic()))
        follower.kill()
        follower.wait()
