"""Guards who owns packed experts: they outlive a server but not the supervisor; other users see none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app.planning.memory import segment_bytes
from app.supervisor.health import Plan
from app.supervisor.supervisor import Supervisor
from app.supervisor.weight_files import HUGE_PAGE, WeightFile, WeightFiles, fits_reserved
from moebius.config.loader import load_config
from moebius.errors import StartupError
from moebius.kernels.weight_segment import WeightSegment, segment_path
from moebius.kv_tiers import ram_tier_path
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.fake_programs import QUICK, alive, plan, spec
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

# Adds a byte to the memory next to its mark, as an expert server would, and notes how many there are.
PACKING = """
import pathlib, signal, sys
mark = pathlib.Path(sys.argv[1])
memory = mark.parent / "run" / "expert-0.weights"
with open(memory, "ab") as file:
    file.write(b"x")
mark.write_text(str(memory.stat().st_size))
while True:
    signal.pause()
"""

SUPERVISOR_PROGRAM = """
import sys
from pathlib import Path
from app.supervisor.supervisor import Supervisor
from tests.helpers.fake_programs import QUICK
from tests.service.test_supervisor_weights import packing
directory = Path(sys.argv[1])
with Supervisor(packing(directory), QUICK) as supervisor:
    supervisor.wait_ready()
    (directory / "up").touch()
    supervisor.run()
"""


def packing(directory: Path) -> Plan:
    """Returns one server that packs."""
    file = WeightFile(segment_path(str(directory / "run"), 0), 0, -1)
    return replace(plan(directory, spec("expert-0", PACKING, directory)), weights=(file,))


def watched_until(supervisor: Supervisor, mark: Path, text: str) -> None:
    """Lets the supervisor restart what died until the mark reads so."""
    end = time.monotonic() + 60
    supervisor.run(lambda: mark.read_text() == text or time.monotonic() > end)
    assert mark.read_text() == text


def held_memory() -> list[str]:
    """Anonymous files of packed experts that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # the directory's own
            continue
    return [name for name in found if "moebius-expert" in name]


def test_memory_outlives_a_server_but_not_the_supervisor(tmp_path: Path) -> None:
    """A server that was killed finds what it wrote; after a clean stop neither link nor memory is left."""
    with Supervisor(packing(tmp_path), QUICK) as supervisor:
        assert supervisor.wait_ready()
        link = tmp_path / "run" / "expert-0.weights"
        assert link.is_symlink()
        assert link.stat().st_mode & 0o777 == 0o600
        assert len(held_memory()) == 1
        process = supervisor.processes[0]
        for expected in ("2", "3"):
            os.kill(process.pid or 0, signal.SIGKILL)
            watched_until(supervisor, tmp_path / "expert-0", expected)
    assert not link.is_symlink()
    assert held_memory() == []
    with Supervisor(packing(tmp_path), QUICK) as supervisor:
        assert supervisor.wait_ready()
        wait_until(lambda: (tmp_path / "expert-0").read_text() == "1")


def test_prefixes_in_ram_are_held_as_packed_experts_are(tmp_path: Path) -> None:
    """Under a link in the run directory, from start to stop, for the owner alone."""
    file = WeightFile(ram_tier_path(str(tmp_path / "run")), 0, -1)
    with Supervisor(replace(packing(tmp_path), prefixes=(file,)), QUICK) as supervisor:
        assert supervisor.wait_ready()
        assert file.path.is_symlink()
        assert file.path.stat().st_mode & 0o777 == 0o600
        file.path.write_bytes(b"x")
        assert file.path.read_bytes() == b"x"
    assert not file.path.is_symlink()


def test_a_killed_supervisor_leaves_a_link_to_nothing(tmp_path: Path) -> None:
    """Its servers and the memory go with it; the next start makes a new link, with nothing in it."""
    command = [sys.executable, "-c", SUPERVISOR_PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        wait_until((tmp_path / "up").exists)
        document = json.loads((tmp_path / "run" / "run.json").read_text())
        process.kill()
    wait_until(lambda: not any(alive(entry["pid"]) for entry in document["processes"]))
    link = tmp_path / "run" / "expert-0.weights"
    assert link.is_symlink()
    assert not link.exists()
    with Supervisor(packing(tmp_path), QUICK) as supervisor:
        assert supervisor.wait_ready()
        wait_until(lambda: (tmp_path / "expert-0").read_text() == "1")


def reserved(root: Path, place: str, pages: int) -> None:
    """A system with a number of free reserved pages there."""
    directory = root / place / "hugepages/hugepages-2048kB"
    directory.mkdir(parents=True)
    (directory / "free_hugepages").write_text(f"{pages}\n")


@pytest.mark.parametrize(
    ("sizes", "nodes", "fits"),
    [
        ((3, 3), (0, 1), True),
        ((4, 2), (0, 1), False),  # node 0 has 3
        ((3, 4), (-1, -1), False),  # the machine has 6
        ((3, 3), (-1, -1), True),
        ((0, 3), (-1, -1), False),  # not known
        ((), (), False),
    ],
)
def test_reserved_pages_are_taken_where_all_fit(
    tmp_path: Path, sizes: tuple[int, ...], nodes: tuple[int, ...], fits: bool
) -> None:
    """Pages must fit on the machine and on every node: a server that ran out of them on its node could not
    load.
    """
    reserved(tmp_path, "kernel/mm", 6)
    reserved(tmp_path, "devices/system/node/node0", 3)
    reserved(tmp_path, "devices/system/node/node1", 3)
    files = [
        WeightFile(tmp_path / f"expert-{index}.weights", size * HUGE_PAGE, node)
        for index, (size, node) in enumerate(zip(sizes, nodes, strict=True))
    ]
    assert fits_reserved(files, tmp_path) is fits
    assert not fits_reserved(files, tmp_path / "a system without")


def test_a_link_that_can_not_be_made_is_named_and_nothing_stays_open(tmp_path: Path) -> None:
    """The second of two files fails."""
    files = [WeightFile(tmp_path / "a", 0, -1), WeightFile(tmp_path / "none" / "b", 0, -1)]
    with pytest.raises(StartupError, match="cannot use the state directory"):
        WeightFiles(files)
    assert held_memory() == []


@pytest.mark.parametrize("dtype", ["keep", "int8"])
def test_what_a_server_will_need_is_what_it_makes(tmp_path: Path, dtype: str) -> None:
    """The size by which reserved pages are chosen is that of the server's file."""
    from expert_service.host import ExpertHost, LoadSettings
    from expert_service.placement import ThreadPlacement
    from moebius.experts.slices import SliceRequest

    model = TinyMoe(num_experts=5, num_layers=3).write(tmp_path)
    config = load_config(None, {"model": str(model), "expert_dtype": dtype})
    sizes = segment_bytes(config, read_geometry(model), 2)
    assert len(sizes) == 2
    settings = LoadSettings(calibrate_kernels=False, expert_weights_dir=str(tmp_path))
    for index, size in enumerate(sizes):
        host = ExpertHost(ThreadPlacement(-1, 1, ()), lambda *_: None, lambda: None, settings)
        request = SliceRequest(str(model), split_index=index, split_count=2, weight_dtype=dtype)  # type: ignore[arg-type]
        host.load(request)
        assert WeightSegment.open(segment_path(str(tmp_path), index)).data.nbytes == size
