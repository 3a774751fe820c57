"""Guards several models behind one port as users start them: each answers as it does alone, in its turn."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from app.cli import main as cli
from app.supervisor.running_systems import running_systems
from tests.helpers.ports import free_port
from tests.helpers.stack import Stack
from tests.helpers.swapped_files import put
from tests.helpers.waiting import wait_ready
from tests.helpers.warm_processes import start_program

pytestmark = [pytest.mark.full, pytest.mark.plain_http]
LIMIT_S = 300


def write_model(directory: Path, seed: int) -> Path:
    """Returns a tiny checkpoint; others of another seed answer otherwise."""
    with contextlib.suppress(SystemExit):
        cli(["models", "random", str(directory), "--shape", "tiny", "--layers", "1", "--seed", str(seed)])
    return directory


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two tiny models and one that is not there, of which one may be loaded."""
    directory, port = tmp_path_factory.mktemp("models"), free_port()
    models = [f"  m{seed}: {{model: {write_model(directory / f'm{seed}', seed)}}}" for seed in (1, 2)]
    (directory / "empty").mkdir()
    text = f"""
gateway: {{port: {port}, prompt_workers: 1, batch_dir: "off"}}
gpu: {{gpu_threads: 1}}
supervisor: {{state_dir: {directory / "state"}, model_residency_s: 0}}
models:
"""
    (directory / "models.yaml").write_text(text + "\n".join(models) + "\n")
    command = ["-m", "moebius", "serve", str(directory / "models.yaml")]
    log, url = directory / "log", f"http://127.0.0.1:{port}"
    with log.open("wb") as sink:
        process = start_program(command, sink, sink)
    try:
        wait_ready(url, process, log, LIMIT_S)
        yield Stack(process, url, log, directory / "state", url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, log.read_text()[-4000:]
        assert not list((directory / "state").glob("*/run.json"))
    finally:
        process.kill()
        process.wait()


def text_of(stack: Stack, model: str) -> str:
    """Returns a model's greedy answer."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def states(stack: Stack) -> dict[str, str]:
    """Returns the state of each model."""
    found: dict[str, str] = httpx.get(f"{stack.base_url}/ready", timeout=LIMIT_S).json()["models"]
    return found


def test_models_are_swapped(stack: Stack) -> None:
    """Requests for both at once are all answered, by the model that they name; the other one sleeps then,
    and one that was killed, loaded or asleep, starts again."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: (name, text_of(stack, name)), ["m1", "m2"] * 4))
    expected = dict(answers)
    assert expected["m1"] != expected["m2"]
    assert all(text == expected[name] for name, text in answers)
    assert sorted(states(stack).values()) == ["loaded", "sleeping"]
    systems = {one.model: one for one in running_systems(stack.state_dir)}
    assert set(systems) == {"m1", "m2", "m1, m2"}
    assert systems["m1, m2"].url == stack.base_url
    for name in ("m1", "m2"):
        os.kill(systems[name].pid, signal.SIGKILL)
    assert {name: text_of(stack, name) for name in ("m1", "m2")} == expected


def test_changed_weights_are_reloaded_under_traffic(stack: Stack, tmp_path: Path) -> None:
    """Every answer is the old model's or the new one's as a whole, after the reload the new one's, with the
    same prompt; of files that are changed nothing is read before it."""
    old, new = text_of(stack, "m1"), text_of(stack, "m2")
    assert text_of(stack, "m1") == old
    directory = stack.state_dir.parent / "m1"
    for file in write_model(tmp_path / "new", 2).iterdir():
        put(directory / file.name, file.read_bytes())
    assert text_of(stack, "m1") == old
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(text_of, stack, "m1") for _ in range(20)]
        assert httpx.post(f"{stack.base_url}/reload?model=m1", timeout=LIMIT_S).json()["success"]
        later = text_of(stack, "m1")
        texts = [answer.result() for answer in answers]
    assert later == new
    assert set(texts) <= {old, new}
    body = {"model_path": "/etc"}
    refused = httpx.post(f"{stack.base_url}/update_weights_from_disk?model=m1", json=body, timeout=LIMIT_S)
    assert refused.status_code == 400
    assert f"allowed is '{directory}'" in refused.text
