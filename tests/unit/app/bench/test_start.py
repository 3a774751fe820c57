"""Guards `moebius bench start`: what is read from a system's output, and that a kill is really one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.bench.start import ServeLog, Serving, StartRow, _kill_one, drop_from_page_cache, run
from moebius.config import MoebiusConfig
from moebius.errors import UserError


def log_of(*entries: dict[str, object] | str) -> ServeLog:
    lines = (entry if isinstance(entry, str) else json.dumps(entry) for entry in entries)
    log = ServeLog(io.StringIO("".join(f"{line}\n" for line in lines)))
    log.join()
    return log


def test_summaries_and_returns_are_found_between_other_lines() -> None:
    """The last summary of a process counts; plain lines and broken JSON are passed over."""
    log = log_of(
        "expert-0: starting after 0.0 s",
        {"event": "ready", "process": "gpu", "phases": {"starting Python": 1.5}},
        '{"event": "cut off',
        {"event": "experts loaded", "process": "expert-0", "phases": {"packing experts": 9.0}},
        {"event": "process ready", "process": "supervisor", "name": "expert-0", "restarts": 1},
        {"event": "experts loaded", "process": "expert-0", "phases": {"starting Python": 0.5}},
    )
    assert log.phases == {"gpu": {"starting Python": 1.5}, "expert-0": {"starting Python": 0.5}}
    assert log.returned == ["expert-0"]
    assert len(log.last_lines) == 6
    assert not log.is_supervised
    assert log_of({"event": "ready", "process": "supervisor", "model": "m"}).is_supervised


def test_expert_servers_are_read_from_the_run_file(tmp_path: Path) -> None:
    """Only expert servers may be killed: the engine's death is another story."""
    running = [{"name": name, "pid": pid} for name, pid in (("gpu", 5), ("expert-1", 7), ("expert-0", 6))]
    run_file = tmp_path / "run.json"
    run_file.write_text(json.dumps({"processes": running}))
    serving = Serving(None, "model", 1.0, log_of(), run_file, None)  # type: ignore[arg-type]
    assert min(serving.expert_servers().items()) == ("expert-0", 6)


def test_a_system_that_ends_instead_of_returning_is_reported(tmp_path: Path) -> None:
    """The system is reported at once, and with its last words."""
    run_file = tmp_path / "run.json"
    with (
        subprocess.Popen(["sleep", "60"]) as server,
        subprocess.Popen(["sleep", "0"], text=True) as ended,
    ):
        ended.wait()
        run_file.write_text(json.dumps({"processes": [{"name": "expert-0", "pid": server.pid}]}))
        log = log_of({"event": "ready", "process": "supervisor"}, "gave up")
        client = SimpleNamespace(stream=lambda *_: [])
        system = Serving(client, "model", 1.0, log, run_file, ended)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"expert-0 did not come back:(.|\n)*gave up"):
            _kill_one(system)
        assert server.wait() == -signal.SIGKILL


def test_rows_are_json() -> None:
    """What `--json` writes can be read back."""
    row = StartRow("killed", 0.8, 0.9, {"expert-0": {"starting Python": 0.4}})
    assert json.loads(json.dumps(asdict(row)))["phases"]["expert-0"] == {"starting Python": 0.4}


@pytest.mark.parametrize("directory", [True, False])
def test_files_survive_that_are_dropped_from_the_page_cache(tmp_path: Path, directory: bool) -> None:
    """A checkpoint's directory or a single GGUF file: forgotten by the kernel, not changed."""
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(1 << 20))
    before = file.read_bytes()
    drop_from_page_cache(tmp_path if directory else file)
    assert file.read_bytes() == before


def test_a_system_that_does_not_start_is_reported_with_its_words(tmp_path: Path) -> None:
    """No waiting for a system that has ended already."""
    (tmp_path / "config.json").write_text("{}")
    config = MoebiusConfig()
    config = config.model_copy(update={"model": config.model.model_copy(update={"model": str(tmp_path)})})
    with pytest.raises(UserError, match=r"ended before it was ready:(.|\n)*model_type"):
        run(config, None)
