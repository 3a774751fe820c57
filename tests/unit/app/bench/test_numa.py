"""Invariant: `moebius bench numa` counts a server's bytes on the node where they lie, and no program code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app import cli
from app.bench.numa import MOST_ELSEWHERE, ServerPages, audit, pages_by_node
from moebius.config.loader import effective_config, load_config

# As Documentation of the kernel and numa_maps(5) have them.
LINES = """\
7f0000000000 default file=/memfd:moebius-experts\\040(deleted) mapped=100 N0=97 N1=3 kernelpagesize_kB=2048
7f1000000000 bind:0 anon=50 dirty=50 N0=50 kernelpagesize_kB=4
7f2000000000 default file=/usr/lib/libtorch.so mapped=900 N1=900 kernelpagesize_kB=4
7f3000000000 default stack anon=2 dirty=2 N0=2
"""


def test_pages_are_counted_where_they_lie() -> None:
    """Huge pages count whole; code, which every process reads, does not count."""
    found = pages_by_node(LINES.splitlines())
    assert found == {0: 97 * 2**21 + 52 * 4096, 1: 3 * 2**21}
    server = ServerPages("expert-0", 0, found)
    assert server.elsewhere == pytest.approx(0.03, rel=1e-2)
    assert server.elsewhere > MOST_ELSEWHERE
    assert ServerPages("expert-0", -1, found).elsewhere == 0


def test_running_servers_are_found(tmp_path: Path) -> None:
    """Each expert server of a run file, with the node of its settings; one that has ended is left out."""
    directory = tmp_path / "state" / "serve-1"
    directory.mkdir(parents=True)
    processes = [{"name": name, "pid": pid} for name, pid in (("gpu", 1), ("expert-0", 2), ("expert-1", 3))]
    (directory / "run.json").write_text(json.dumps({"processes": processes}))
    for index in (0, 1):
        config = load_config(None, {"numa_node": str(index), "model": "m"})
        (directory / f"expert-{index}.yaml").write_text(effective_config(config))
    (tmp_path / "proc/2").mkdir(parents=True)
    (tmp_path / "proc/2/numa_maps").write_text(LINES)
    (found,) = audit(tmp_path / "state", tmp_path / "proc")
    assert (found.name, found.node) == ("expert-0", 0)
    assert found.nbytes == pages_by_node(LINES.splitlines())


@pytest.mark.full
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every node's threads read every node's memory, and the file has what was printed."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["bench", "numa", "--state-dir", str(tmp_path), "--json", str(tmp_path / "numa.json")])
    assert not exit_info.value.code
    found = json.loads((tmp_path / "numa.json").read_text())
    nodes = {row["cpus_of"] for row in found["reads"]}
    assert len(found["reads"]) == len(nodes) ** 2
    assert all(row["bytes_per_second"] > 0 for row in found["reads"])
    assert "no expert server runs here" in capsys.readouterr().out
