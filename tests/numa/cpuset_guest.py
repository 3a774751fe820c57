"""/init of the two-node guest: containers as the kubelet's static managers make them.

In the guest (`cpuset_guest.py 1|2`, the version of cgroups) each layout is a cgroup with its CPUs and memory
nodes; a process in it is a server that looks for its node, then `moebius doctor`. Lines as in numa_guest.cc.
On the host `cpuset_guest.py files` does as much of the same and prints every file that was loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import sys
import traceback
from pathlib import Path

IN_GUEST = os.getpid() == 1
if IN_GUEST:
    sys.path[:0] = ["/src", "/site"]

CGROUP = Path("/sys/fs/cgroup")
NBYTES = 8 << 20
# Name -> CPUs, memory nodes, the node that a server finds (a text: what it says instead), and its threads:
# CPUs 2n and 2n + 1 are threads of one core.
LAYOUTS: dict[str, tuple[str, str, int | str, int]] = {
    "one node, the first": ("0-3", "0", 0, 2),
    "one node, the second": ("4-7", "1", 1, 2),
    "one thread of each core": ("5,7", "1", 1, 2),
    "one core": ("2-3", "0", 0, 1),
    "one CPU": ("7", "1", 1, 1),
    "CPUs of two nodes": ("3-4", "0-1", "are of 2 nodes (node 0: 3, node 1: 4)", 0),
    "memory of the other node": ("4-7", "0", "are of node 1, its memory of [0]", 0),
}
CHECK = "CPUs of this container"


def serve_here() -> tuple[int, int] | str:
    """Returns the node that an expert server of this process binds itself to, once its memory was seen there,
    and its threads; else what it says.
    """
    from expert_service.placement import place_process
    from moebius.config import ExpertConfig
    from moebius.host.topology import Topology, page_nodes

    try:
        placed = place_process(ExpertConfig.model_validate({"numa_node": "cpuset"}), Topology.detect())
    except ValueError as error:
        return str(error)
    area = mmap.mmap(-1, NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    ctypes.memset(address, 1, NBYTES)
    nodes = set(page_nodes(address, NBYTES))
    if IN_GUEST and nodes != {placed.numa_node}:
        return f"bound to node {placed.numa_node}, memory on {nodes}"
    return placed.numa_node, placed.num_threads


def doctor_line() -> str:
    """Returns what the preflight says of this container's CPUs."""
    from app import cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(["doctor", "--kubernetes", "--role", "server"])
    return next((line for line in out.getvalue().splitlines() if CHECK in line), out.getvalue())


def enter(version: int, name: str, cpus: str, memory: str) -> None:
    """Makes the container's group, inside its Pod's, as the kubelet does, and moves this process there."""
    base = CGROUP if version == 2 else CGROUP / "cpuset"
    place = base
    for part in ("kubepods", name.replace(" ", "-").replace(",", "")):
        if version == 2:
            (place / "cgroup.subtree_control").write_text("+cpuset")
        place = place / part
        place.mkdir(exist_ok=True)
        last = part != "kubepods"
        (place / "cpuset.mems").write_text(memory if last else "0-1")
        (place / "cpuset.cpus").write_text(cpus if last else "0-7")
    (place / "cgroup.procs").write_text(str(os.getpid()))


def check_layout(version: int, name: str) -> bool:
    """In a process of its own; prints the lines."""
    cpus, memory, expected, threads = LAYOUTS[name]
    enter(version, name, cpus, memory)
    found, line = serve_here(), doctor_line()
    if isinstance(expected, int):
        good, named = found == (expected, threads), line.startswith("ok") and f"node {expected}" in line
    else:
        good, named = expected in str(found), line.startswith("FAILURE") and "kubelet settings" in line
    print(f"{'PASS' if good else 'FAIL'} v{version} server, {name}: {found}", flush=True)
    print(f"{'PASS' if named else 'FAIL'} v{version} preflight, {name}: {line}", flush=True)
    return good and named


def run(version: int) -> int:
    """Returns all layouts; the number of those that failed."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(kind: str, place: Path, options: str = "") -> None:
        place.mkdir(parents=True, exist_ok=True)
        if libc.mount(kind.encode(), str(place).encode(), kind.encode(), 0, options.encode()):
            raise OSError(ctypes.get_errno(), f"mount {kind}")

    for kind, place in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/dev/shm"), ("tmpfs", "/tmp")):
        mount(kind, Path(place))
    if version == 2:
        mount("cgroup2", CGROUP)
    else:
        mount("tmpfs", CGROUP)
        mount("cgroup", CGROUP / "cpuset", "cpuset")
    # Once for all children: under emulation, imports are what takes time.
    serve_here()
    doctor_line()
    failed = 0
    for name in LAYOUTS:
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if check_layout(version, name) else 1)
            except BaseException:
                print(f"FAIL v{version} {name}: {traceback.format_exc()}", flush=True)
                os._exit(1)
        failed += os.waitpid(child, 0)[1] != 0
    return failed


def loaded_files() -> list[str]:
    """Modules and libraries of this process, after it has done what the guest will do."""
    serve_here()
    doctor_line()
    modules = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = {line.split(maxsplit=5)[5].strip() for line in lines if "/" in line}
    return sorted(path for path in (modules | maps) if path and os.path.isfile(path))


if __name__ == "__main__":
    if sys.argv[1] == "files":
        print("\n".join(loaded_files()))
    else:
        failures = 1
        print(flush=True)  # ends the firmware's last line
        try:
            failures = run(int(sys.argv[1]))
        except Exception:
            print(f"FAIL no exception: {traceback.format_exc()}", flush=True)
        print(f"DONE {failures}", flush=True)
        ctypes.CDLL(None).reboot(0x4321FEDC)
