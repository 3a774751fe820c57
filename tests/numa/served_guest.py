"""/init of a guest without AVX-512: the demo, and a served model that answers over HTTP.

It prints what the CPU has, what `moebius doctor` says of it, and a line per check, as numa_guest.cc does.
With the argument `two-nodes` it is a guest of two NUMA nodes: doctor and plan see both, and where the memory
of each expert server of a served model lies is audited. The disk (`served_root.py`) has our code below /src,
packages below /site, Python in its place.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

MODEL = "/root/.cache/moebius/smollm2-135m-moe"
QUESTION = "What is the capital of France?"
PORT = 8000
# Emulated, a process takes minutes to import what takes seconds.
PATIENCE = ["--ready-timeout-s", "1700", "--hang-timeout-s", "600", "--no-calibrate-kernels"]


def mount_all() -> None:
    """What an init mounts, and the loopback interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = {"/dev": "devtmpfs", "/proc": "proc", "/sys": "sysfs", "/dev/shm": "tmpfs", "/tmp": "tmpfs"}
    for place, kind in kinds.items():
        Path(place).mkdir(parents=True, exist_ok=True)
        if libc.mount(kind.encode(), place.encode(), kind.encode(), 0, b""):
            raise OSError(ctypes.get_errno(), f"mount {kind}")
    request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interface:
        fcntl.ioctl(interface, 0x8914, request)  # SIOCSIFFLAGS


def check(name: str, passed: bool, found: object) -> bool:
    """Prints the line of one check."""
    print(f"{'PASS' if passed else 'FAIL'} {name}: {found}", flush=True)
    return passed


def moebius(*arguments: str) -> list[str]:
    """The command line of our own program."""
    return [sys.executable, "-c", "from app.cli import main; main()", *arguments]


def run(*arguments: str) -> str:
    """Returns what the command says, printed as well; its end is a check of its own."""
    begin, lines = time.monotonic(), []
    print(f"$ moebius {' '.join(arguments)}", flush=True)
    with subprocess.Popen(
        moebius(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    print(f"({time.monotonic() - begin:.0f} s, status {child.returncode})", flush=True)
    return "".join(lines)


def check_cpu() -> bool:
    """The CPU is one of those that this guest is for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    print("Flags:", " ".join(flags), flush=True)
    wide = [flag for flag in flags if flag.startswith(("avx512", "amx", "avx_ne_convert"))]
    return check("the CPU has AVX2", {"avx2", "fma"} <= set(flags), "") & check(
        "the CPU has no AVX-512", not wide, wide
    )


def check_doctor() -> bool:
    """The preflight names the instruction set and what it costs."""
    line = next((line for line in run("doctor").splitlines() if "instruction set" in line), "")
    return check("doctor names the instruction set", "avx2" in line and "float32" in line, line)


def check_demo() -> bool:
    """Returns the first command of the README."""
    text = run("demo", "--prompt", QUESTION, "--max-num-seqs", "2", *PATIENCE)
    return check("the demo answers", "Paris" in text and "tokens/s" in text, "")


def answer() -> str:
    """One greedy answer of the server."""
    body = {
        "model": "guest",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 8,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def check_served() -> bool:
    """Returns whether a server with an expert server answers over HTTP."""
    return serve(["--expert-servers", "1"], lambda: True)


def check_two_nodes() -> bool:
    """Doctor says how many servers start, plan divides RAM by the nodes."""
    doctor, plan = run("doctor", MODEL), run("plan", MODEL, "--max-num-seqs", "2")
    threads = [line for line in doctor.splitlines() if "expert threads of node" in line]
    both = all(f"experts of server {server}" in plan for server in (0, 1))
    return check("doctor starts a server on each node", len(threads) == 2, threads) & check(
        "plan counts both nodes", "2 NUMA node(s)" in plan and both, ""
    )


def check_served_nodes() -> bool:
    """Returns whether a server with an expert server on each node answers, and holds its memory there."""
    return serve([], check_placed)


def check_placed() -> bool:
    """Each expert server of the running system is on a node of its own, with its memory."""
    document = Path("/tmp/numa.json")
    run("bench", "numa", "--json", str(document))
    measured = json.loads(document.read_text())
    found = [(server["name"], server["node"], server["elsewhere"]) for server in measured["servers"]]
    nodes = sorted(node for _, node, _ in found)
    return (
        check("bench numa read all pairs of nodes", len(measured["reads"]) == 4, measured["reads"])
        & check("each node has an expert server", nodes == [0, 1], nodes)
        & check("weights lie on their node", all(part <= 0.02 for *_, part in found), found)
    )


def serve(options: list[str], beside: Callable[[], bool]) -> bool:
    """Returns whether a server answers over HTTP, and `beside`, called while it runs, is true; it is stopped
    afterwards.
    """
    command = ["serve", MODEL, "--served-model-name", "guest", *options]
    command += ["--port", str(PORT), "--max-num-seqs", "2", *PATIENCE]
    begin, log = time.monotonic(), Path("/tmp/server.log")
    print(f"$ moebius {' '.join(command)}", flush=True)
    # Not on the console: what moves on a terminal costs an emulated CPU more than loading.
    with log.open("wb") as sink:
        server = subprocess.Popen(moebius(*command), stdout=sink, stderr=sink)
    try:
        while not is_ready():
            if server.poll() is not None:
                return check("a server answers", False, f"it ended with status {server.returncode}")
            time.sleep(1)
        print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
        text = answer()
        return check("a server answers", "Paris" in text, repr(text)) & beside()
    finally:
        server.terminate()
        stopped = server.wait(300) == 0
        print(log.read_text(), flush=True)
        check("the server stops", stopped, server.returncode)


def is_ready() -> bool:
    """Returns what an orchestrator asks."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=60) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def run_all() -> int:
    """Returns all checks; the number of those that failed."""
    mount_all()
    os.environ.update(HOME="/root", PYTHONPATH="/src:/site", PATH="/usr/bin:/bin", LANG="C.UTF-8")
    os.environ["PYTHONUNBUFFERED"] = "1"
    steps = [check_cpu, check_doctor, check_demo, check_served]
    if "two-nodes" in sys.argv:
        steps = [check_two_nodes, check_served_nodes]
    return sum(not step() for step in steps)


if __name__ == "__main__":
    failures = 1
    print(flush=True)  # ends the firmware's last line
    try:
        failures = run_all()
    except Exception:
        print(f"FAIL no exception: {traceback.format_exc()}", flush=True)
    print(f"DONE {failures}", flush=True)
    os.sync()
    ctypes.CDLL(None).reboot(0x4321FEDC)
