"""Guards `moebius bench gateway`: it runs for anybody, and its figures are of what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.gateway.processes import cpu_seconds, descendants
from lab.bench.gateway.run import GatewayOptions, run
from tests.helpers.idle import becomes_idle


@pytest.mark.full
def test_every_figure_is_measured_together_with_its_limit(tmp_path: Path) -> None:
    """The streams run at the pace that was asked for, in front of both servers; heavy requests are answered
    (another status ends the bench), and the rows are in the file."""
    file = tmp_path / "rows.json"
    options = GatewayOptions(
        streams=4, step_ms=20, seconds=0.5, arrivals=8, connections=2, heavy=("128k words", "20 images")
    )
    rows = {row.figure: row for row in run(options, file)}
    assert [row["figure"] for row in json.loads(file.read_text())] == list(rows)
    assert len(rows) == 8
    assert all(row.ours > 0 and row.limit > 0 for row in rows.values())
    paced = rows["tokens per second meanwhile"]
    # 4 streams, 50 tokens a second each; a busy machine makes it fewer, nothing makes it more.
    assert 2 < paced.ours < 260
    assert 2 < paced.limit < 260


def test_processor_time_is_that_of_the_process_and_not_of_the_clock() -> None:
    """A process that sleeps has used nearly none, one that computes has."""
    busy = (
        "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
        "print(flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            assert cpu_seconds([process.pid]) >= 0.3
            assert becomes_idle(lambda: cpu_seconds([process.pid]))
            assert process.pid in descendants(os.getpid())
        finally:
            process.kill()
