"""Guards placement on real hardware terms: a Linux kernel with two NUMA nodes agrees with kernels/topology.

The guest (numa_guest.cc) prints a line per check; skipped, with the missing package, where it cannot boot.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run_guest.sh")
MISSING_TOOL = 77
EXPECTED_CHECKS = (
    "two nodes",
    "node 0 cpus",
    "node 1 cpus",
    "node 0 a thread for each physical core",
    "node 1 a thread for each physical core",
    "pinned to node 0 and running there",
    "pinned to node 1 and running there",
    "memory bound to node 0 lies there",
    "memory bound to node 1 lies there",
    "touched pages were moved to node 0",
    "touched pages were moved to node 1",
    "unbound memory is local to its thread",
    "absent node is refused with a reason",
)


@pytest.fixture(scope="module")
def console() -> list[str]:
    """Returns lines the guest printed."""
    result = subprocess.run([SCRIPT], capture_output=True, text=True, errors="replace", check=False)
    if result.returncode == MISSING_TOOL:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr + result.stdout
    return [line.strip() for line in result.stdout.splitlines()]


@pytest.mark.numa
def test_guest_ran_to_its_end_without_a_failure(console: list[str]) -> None:
    """No check of the guest failed, and it did not die before the last one."""
    assert [line for line in console if line.startswith("FAIL")] == []
    assert "DONE 0" in console, "\n".join(console[-30:])


@pytest.mark.numa
@pytest.mark.parametrize("check", EXPECTED_CHECKS)
def test_guest_checked(console: list[str], check: str) -> None:
    """Each promised check was really made, and passed."""
    passed = [line.removeprefix("PASS ").split(": ")[0] for line in console if line.startswith("PASS ")]
    assert check in passed
