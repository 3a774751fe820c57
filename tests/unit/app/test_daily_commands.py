"""Guards `ps`, `stop`, `list` and `rm`: they name what is there, and end or delete nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from app.commands.daily import age
from app.server_address import server_url
from app.supervisor.runfile import start_ticks
from app.supervisor.running_systems import chosen_system, running_systems
from moebius.errors import UserError
from tests.helpers.warm_processes import run_program


def moebius(*arguments: str, cache: Path | None = None) -> tuple[int, str, str]:
    """Returns exit status, stdout and stderr of a command."""
    environment = os.environ | ({"HF_HUB_CACHE": str(cache)} if cache else {})
    ended = run_program(["-m", "moebius", *arguments], env=environment)
    return ended.returncode, ended.stdout, ended.stderr


def system(state: Path, port: int, pid: int, ticks: int | None) -> None:
    """Writes what a supervisor leaves in its run directory."""
    directory = state / f"serve-{port}"
    directory.mkdir(mode=0o700)
    processes = [{"name": "gateway", "pid": pid, "start_ticks": ticks}]
    document = {"supervisor": {"pid": pid, "start_ticks": ticks}, "processes": processes, "segments": []}
    (directory / "run.json").write_text(json.dumps(document))
    settings = f"model: {{served_model_name: m{port}}}\ngateway: {{port: {port}, host: 0.0.0.0}}\n"
    (directory / "gateway.yaml").write_text(settings)


def test_running_servers_are_listed_and_stopped(tmp_path: Path) -> None:
    """Servers are found by port or model; one whose process is another by now, or that others could write to,
    is none.
    """
    with subprocess.Popen(["sleep", "600"]) as first, subprocess.Popen(["sleep", "600"]) as second:
        for process in (first, second):  # somebody has to take notice of their ends
            threading.Thread(target=process.wait, daemon=True).start()
        try:
            system(tmp_path, 81, first.pid, start_ticks(first.pid))
            system(tmp_path, 82, second.pid, start_ticks(second.pid))
            system(tmp_path, 83, os.getpid(), 1)
            system(tmp_path, 84, os.getpid(), start_ticks(os.getpid()))
            (tmp_path / "serve-84").chmod(0o777)
            found = running_systems(tmp_path)
            assert [(one.model, one.url) for one in found] == [
                ("m81", "http://127.0.0.1:81"),
                ("m82", "http://127.0.0.1:82"),
            ]
            for wanted in ("82", "m82", "serve-82"):
                assert chosen_system(found, wanted).pid == second.pid
            for wanted, said in (("", "several servers run here"), ("83", "no such server runs here")):
                with pytest.raises(UserError, match=said):
                    chosen_system(found, wanted)
            for wanted, url in (("82", found[1].url), ("m81", found[0].url), ("http://h:1", "http://h:1")):
                assert server_url(wanted, tmp_path) == url
            with pytest.raises(UserError, match="several servers run here, name one by its port"):
                server_url("", tmp_path)
            status, out, _ = moebius("ps", "--state-dir", str(tmp_path))
            assert (status, [line.split()[:3] for line in out.splitlines()[1:]]) == (
                0,
                [
                    ["m81", "http://127.0.0.1:81", str(first.pid)],
                    ["m82", "http://127.0.0.1:82", str(second.pid)],
                ],
            )
            status, out, err = moebius("stop", "82", "--state-dir", str(tmp_path))
            assert (status, out) == (0, f"m82 (pid {second.pid}) has ended\n"), err
            assert first.poll() is None
            assert server_url("", tmp_path) == "http://127.0.0.1:81"
            assert server_url("", tmp_path / "empty") == "http://127.0.0.1:8000"
            assert moebius("stop", "--state-dir", str(tmp_path))[0] == 0
            status, _, err = moebius("stop", "--state-dir", str(tmp_path))
            assert (status, "nothing runs here" in err) == (2, True)
        finally:
            first.kill()
            second.kill()


def test_downloaded_models_are_listed_and_deleted(tmp_path: Path) -> None:
    """The hub's own cache; nothing is deleted without a yes, while it is served, nor what was not
    named."""
    for name, file in (("models--a--one", "model.safetensors"), ("models--b--two", "README.md")):
        snapshot = tmp_path / name / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        blob = tmp_path / name / "blobs" / "x"
        blob.parent.mkdir()
        blob.write_bytes(b"x" * 3_000_000)
        (snapshot / file).symlink_to(blob)
        refs = tmp_path / name / "refs"
        refs.mkdir()
        (refs / "main").write_text("0" * 40)
    status, out, _ = moebius("list", cache=tmp_path)
    assert status == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "3.0 MB" in lines["a/one"]
    assert "no weights that can be served" in lines["b/two"]
    assert "no weights" not in lines["a/one"]
    assert "'a/other' is not downloaded; downloaded: " in moebius("rm", "a/other", "-y", cache=tmp_path)[2]
    assert "--yes does not ask" in moebius("rm", "a/one", cache=tmp_path)[2]
    with subprocess.Popen(["sleep", "600"]) as serving:
        state = tmp_path / "state"
        state.mkdir()
        system(state, 81, serving.pid, start_ticks(serving.pid))
        model = tmp_path / "models--a--one" / "snapshots" / ("0" * 40)
        settings = f"model: {{model: {model}}}\ngateway: {{port: 81}}\n"
        (state / "serve-81" / "gateway.yaml").write_text(settings)
        refused = moebius("rm", "a/one", "--yes", "--state-dir", str(state), cache=tmp_path)
        serving.kill()
    served = "a/one is served at http://127.0.0.1:81: end that first, with moebius stop"
    assert refused == (2, "", f"moebius: error: {served}\n")
    assert moebius("rm", "a/one", "--yes", cache=tmp_path) == (0, "a/one: 3.0 MB deleted\n", "")
    assert sorted(path.name for path in tmp_path.glob("models--*")) == ["models--b--two"]
    assert moebius("list", cache=tmp_path / "nowhere")[1].splitlines() == ["NAME  SIZE  LAST USED"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (7300, "2 h"), (864000, "10 d")]
)
def test_ages_have_one_unit(seconds: float, said: str) -> None:
    """Ages are shown as people say them."""
    assert age(seconds) == said
