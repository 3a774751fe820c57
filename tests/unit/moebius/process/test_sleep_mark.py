"""Guards what a program leaves to the one that takes its place: files in memory, and nothing to others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moebius.process import sleep_mark
from moebius.process.sleep_mark import adopt_files, hand_over_text, take_over, take_over_text

# Prints open files in memory. Starts over once before, with such a file, and another one that is not left.
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from moebius.process.sleep_mark import adopt_files, hand_over, start_over, take_over

def files():
    found = [f for f in Path("/proc/self/fd").iterdir() if os.path.lexists(f)]
    return sorted(os.readlink(f) for f in found if os.readlink(f).startswith("/memfd:"))

if sys.argv[1:] == ["child"]:
    print("child", files())
    sys.exit()
adopt_files()
found = take_over("notes")
if found is None:
    os.write(kept := os.memfd_create("kept"), b"what was kept")
    os.set_inheritable(os.memfd_create("lost"), True)
    hand_over("notes", kept)
    start_over(os.sched_getaffinity(0))
assert take_over("notes") is None
print(os.pread(found, 99, 0).decode(), files(), flush=True)
subprocess.run([sys.executable, sys.argv[0], "child"], close_fds=False, check=True)
"""


def test_files_pass_to_the_next_program(tmp_path: Path) -> None:
    """It has the one that was left, once; its children have none, and nothing else stays open."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    wanted = ["what was kept ['/memfd:kept (deleted)']", "child []"]
    assert found.stdout.splitlines() == wanted, found.stderr


def test_texts_pass_to_the_next_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a name, once, whichever place of the file the former program was at."""
    monkeypatch.setattr(sleep_mark, "_handed_over", {})
    monkeypatch.setattr(sleep_mark, "_adopted", {})
    hand_over_text("kernels", "first")
    (former,) = sleep_mark._handed_over.values()
    hand_over_text("kernels", "what was chosen é")
    (descriptor,) = sleep_mark._handed_over.values()
    monkeypatch.setenv(sleep_mark._VARIABLE, f"kernels={descriptor}")
    adopt_files()
    assert take_over_text("kernels") == "what was chosen é"
    assert take_over_text("kernels") == ""
    for closed in {former, descriptor}:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)


@pytest.mark.parametrize("text", ["", "notes=", "notes=soon", "notes=987654", "notes=1", ","])
def test_a_variable_of_another_process_is_ignored(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are no file in memory of this process were meant for another one."""
    monkeypatch.setenv(sleep_mark._VARIABLE, text)
    adopt_files()
    assert sleep_mark._VARIABLE not in os.environ
    assert take_over("notes") is None
