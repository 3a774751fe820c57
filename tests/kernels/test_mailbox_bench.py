"""Guards `moebius bench mailbox`: every promised row with its limit, and nothing left in shared memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lab.bench import mailbox


def test_bench_measures_every_row_and_cleans_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1, 8, 64 rows by 1, 2, 4 server processes, printed and in the JSON file alike."""
    rows = mailbox.run(tmp_path / "rows.json", rounds=20)
    assert [(row.servers, row.rows) for row in rows] == [(s, r) for s in (1, 2, 4) for r in (1, 8, 64)]
    for row in rows:
        assert 0 < row.median_us <= row.p99_us
        assert row.ratio == row.median_us / row.limit_us
        assert row.cores >= 1
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [entry["median_us"] for entry in written] == [row.median_us for row in rows]
    assert f"{rows[0].cores} cores" in capsys.readouterr().out
    assert list(Path("/dev/shm").glob(f"moebius-bench-{os.getpid()}-*")) == []
