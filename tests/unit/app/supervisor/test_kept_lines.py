"""Guards what `moebius logs` shows: the last lines, each once and whole, within 2 MiB."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

import pytest

from app.supervisor import kept_lines
from app.supervisor.kept_lines import EARLIER_FILE, FILE, KeptLines, following, last_lines
from app.supervisor.supervisor import Supervisor
from tests.helpers.fake_programs import OBEDIENT, QUICK, plan, spec
from tests.helpers.waiting import wait_until


def numbered(lines: list[str]) -> list[int]:
    """Returns the numbers of lines as these tests write them."""
    return [int(line.removeprefix("line ")) for line in lines]


def test_the_newest_lines_are_kept_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of a limited size hold the newest lines without a gap, from threads that write at once."""
    monkeypatch.setattr(kept_lines, "FILE_BYTES", 4096)
    kept = KeptLines(tmp_path, json_logs=False)
    threads = [
        threading.Thread(target=lambda at=at: [kept.write(f"line {at}{n:03}") for n in range(500)])
        for at in range(1, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(5000, 5100):
        kept.write(f"line {number}")
    kept.close()
    kept.write("line 9999")
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, EARLIER_FILE]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * 4096
    with last_lines(tmp_path, None) as (lines, _):
        assert len(lines) > 4096 // len("line 1000\n")
        assert numbered(lines)[-100:] == list(range(5000, 5100))
    for count in (0, 1, 50):
        with last_lines(tmp_path, count) as (lines, _):
            assert numbered(lines) == list(range(5100 - count, 5100))


def test_following_sees_each_line_once_over_rotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is written while the file is exchanged is lost, nor what came just before the end."""
    monkeypatch.setattr(kept_lines, "FILE_BYTES", 4096)
    monkeypatch.setattr(kept_lines, "_LOOK_S", 0.001)
    kept, seen, ended = KeptLines(tmp_path, json_logs=False), list[str](), threading.Event()
    kept.write("line 0")
    with last_lines(tmp_path, 1) as (lines, file):

        def read() -> None:
            seen.extend(following(tmp_path, file, ended.is_set))

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(1, 2001):
            kept.write(f"line {number}")
            if number % 100 == 0:  # a reader that two rotations overtake misses lines
                wait_until(lambda end=f"line {number}\n": "".join(seen).endswith(end))
        kept.write("line 2001")
        ended.set()
        reader.join()
    assert numbered([*lines, *"".join(seen).splitlines()]) == list(range(2002))


def test_no_room_ends_it_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk costs what is kept, and neither the system nor its output."""
    os.symlink("/dev/full", tmp_path / FILE)
    kept = KeptLines(tmp_path, json_logs=False)
    kept.write("one")
    kept.write("two")
    kept.close()
    assert capsys.readouterr().err.count("No space left") == 1


def test_a_system_keeps_what_it_prints(tmp_path: Path) -> None:
    """Lines of processes, also of those that a start's display took, and of the supervisor; none after it."""
    system, taken = plan(tmp_path, spec("gpu", OBEDIENT, tmp_path)), list[str]()
    with Supervisor(system, QUICK, on_line=lambda name, line: taken.append(line)) as running:
        assert running.wait_ready()
        logging.getLogger("any").warning("of the \x1b[1msupervisor\x1b[0m")
        with last_lines(system.directory, None) as (lines, _):
            assert lines[0] == "gpu      | hello from gpu\n"
            # How a line is written depends on whether a test before has configured this process's logging.
            assert re.fullmatch(r"supervisor\| .*of the supervisor.*\n", lines[1])
    assert taken == ["gpu      | hello from gpu"]
    assert not [each for each in logging.getLogger().handlers if isinstance(each, KeptLines)]
