"""Guards that an engine sleeps and wakes without a wrong or lost answer: asked, killed, and under load."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.supervisor.running_systems import running_systems
from tests.helpers.engine_process import write_one_layer
from tests.helpers.stack import Stack, running_stack

pytestmark = pytest.mark.plain_http
PROMPT = [3 + number % 60 for number in range(200)]
LIMIT_S = 300
# It never sleeps by itself in a test, but clients may ask for it.
FLAGS = ("--gpu-threads", "1", "--kv-offload-gib", "0.01", "--sleep-after-s", "100000", "--batch-dir", "off")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A whole system with a tiny model and a tier in RAM, shared by this file's tests."""
    directory = tmp_path_factory.mktemp("sleep")
    with running_stack(write_one_layer(directory / "tiny"), directory, *FLAGS) as running:
        yield running


def post(stack: Stack, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """Returns the answer, however long it takes."""
    return httpx.post(f"{stack.base_url}{path}", json=body, timeout=LIMIT_S)


def complete(stack: Stack, **fields: Any) -> dict[str, Any]:
    """Returns the answer to one completion."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = post(stack, "/v1/completions", {**body, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    """Returns the text of a completion."""
    return str(answer["choices"][0]["text"])


def is_sleeping(stack: Stack) -> bool:
    """Returns what the gateway says."""
    return bool(httpx.get(f"{stack.base_url}/is_sleeping", timeout=LIMIT_S).json()["is_sleeping"])


def engine_of(stack: Stack) -> psutil.Process:
    """Returns the engine's process."""
    (found,) = stack.children("gpu")
    return found


def kept_by(stack: Stack) -> list[str]:
    """Returns where the system's processes have the memory of residents open or mapped."""
    found: list[str] = []
    for process in psutil.Process(stack.process.pid).children(recursive=True):
        with contextlib.suppress(OSError):  # it has ended
            place = Path(f"/proc/{process.pid}")
            found += (place / "maps").read_text().splitlines()
            for file in (place / "fd").iterdir():
                with contextlib.suppress(OSError):  # it was closed
                    found.append(os.readlink(file))
    return [text for text in found if "memfd:moebius-residents" in text]


def until(condition: Callable[[], object]) -> None:
    """Waits for a condition."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def live(stack: Stack) -> dict[str, Any] | None:
    """Returns the figures of an engine that answers; None: it does not yet."""
    answer = httpx.get(f"{stack.base_url}/v1/live", timeout=LIMIT_S)
    return answer.json() if answer.status_code == 200 else None


def test_a_request_wakes_the_engine(stack: Stack) -> None:
    """What sleeps says so everywhere, twice asked sleeps once, and is woken by a request, whose answer is the
    same and whose prefix comes from the tier in RAM; the process stays one."""
    expected, engine = text_of(complete(stack)), engine_of(stack).pid
    assert post(stack, "/sleep").json() == {"success": True, "is_sleeping": True}
    assert post(stack, "/release_memory_occupation").json()["is_sleeping"]
    assert is_sleeping(stack)
    (listed,) = httpx.get(f"{stack.base_url}/v1/models", timeout=LIMIT_S).json()["data"]
    assert listed["status"] == {"value": "sleeping"}
    assert httpx.get(f"{stack.base_url}/api/ps", timeout=LIMIT_S).json() == {"models": []}
    ready = httpx.get(f"{stack.base_url}/ready", timeout=LIMIT_S)
    assert (ready.status_code, ready.json()["is_sleeping"]) == (200, True)
    (system,) = running_systems(stack.state_dir)
    assert system.is_sleeping
    until(lambda: live(stack) is not None)
    assert (live(stack) or {})["is_sleeping"]
    metrics = httpx.get(f"{stack.metrics_url}/metrics", timeout=LIMIT_S).text
    assert 'moebius:engine_sleeping{engine="0",model_name="tiny"} 1.0' in metrics

    answer = complete(stack)
    assert text_of(answer) == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    assert not is_sleeping(stack)
    assert engine_of(stack).pid == engine
    assert post(stack, "/wake_up").json() == {"success": True, "is_sleeping": False}


def test_killed_asleep_and_under_load(stack: Stack) -> None:
    """Requests that run when sleep is asked for are waited for, later ones wake the engine: none fails. An
    engine that is killed asleep sleeps on until it is asked for."""
    expected = text_of(complete(stack))
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(complete, stack, user=str(number)) for number in range(12)]
        assert pool.submit(post, stack, "/sleep").result().status_code == 200
        assert [text_of(answer.result()) for answer in answers] == [expected] * 12
    assert post(stack, "/sleep").status_code == 200
    former = engine_of(stack)
    former.send_signal(signal.SIGKILL)
    former.wait(LIMIT_S)
    until(lambda: any(child.pid != former.pid for child in stack.children("gpu")) and live(stack) is not None)
    assert is_sleeping(stack)
    assert (live(stack) or {})["is_sleeping"]
    assert text_of(complete(stack)) == expected


def test_residents_are_kept_in_memory(tmp_path: Path) -> None:
    """An engine that holds all experts leaves them to the program that wakes, which packs none and gives the
    memory back; one that was killed asleep packs them again. Answers stay the same.
    """
    model = write_one_layer(tmp_path / "tiny")
    with running_stack(model, tmp_path, *FLAGS, "--gpu-experts-ratio", "1") as stack:
        assert not stack.children("expert")
        expected = text_of(complete(stack))
        for _ in range(2):
            assert post(stack, "/sleep").status_code == 200
            assert text_of(complete(stack)) == expected
            assert not kept_by(stack)
        assert post(stack, "/sleep").status_code == 200
        until(lambda: kept_by(stack))
        former = engine_of(stack)
        former.send_signal(signal.SIGKILL)
        former.wait(LIMIT_S)
        assert text_of(complete(stack)) == expected
        log = stack.log.read_text()
    loaded = [
        (int(experts), int(copied))
        for experts, copied in re.findall(
            r"resident experts loaded.* experts=(\d+).* packed_already=(\d+)", log
        )
    ]
    (count,) = {experts for experts, _ in loaded}
    assert [copied for _, copied in loaded] == [0, count, count, 0]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/sleep?level=2", None, "'level' is 2; allowed is 1"),
        ("/sleep?mode=keep", None, "'mode' is 'keep'; allowed are wait and abort"),
        ("/wake_up?tags=weights", None, "'tags' are ['weights']; allowed are none, or all of"),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}, "'tags' are ['kv_cache']; allowed are none"),
        (
            "/api/chat",
            {"model": "tiny", "messages": [], "keep_alive": "soon"},
            "'keep_alive': 'soon' is no duration; allowed are seconds, or as 5m, 1h30m, -1",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    stack: Stack, path: str, body: dict[str, Any] | None, words: str
) -> None:
    """Parts of a sleep are not taken for all of it."""
    answer = post(stack, path, body)
    assert answer.status_code == 400
    assert words in answer.text
    assert not is_sleeping(stack)


@pytest.mark.full
def test_killed_while_waking(stack: Stack) -> None:
    """A request that woke the engine outlives its death: it is answered by the one that follows."""
    expected = text_of(complete(stack))
    assert post(stack, "/sleep").status_code == 200
    (system,) = running_systems(stack.state_dir)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, stack)
        until(lambda: not (system.directory / "asleep.json").exists())
        engine_of(stack).send_signal(signal.SIGKILL)
        assert text_of(answer.result()) == expected


@pytest.mark.full
def test_force_ends_running_requests(stack: Stack) -> None:
    """Force does not wait: what runs gets an error, and does not wake the engine again."""
    with ThreadPoolExecutor(1) as pool:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1800, "ignore_eos": True, "n": 64}
        running = pool.submit(post, stack, "/v1/completions", body)
        until(lambda: ((live(stack) or {}).get("requests") or {"running": 0})["running"] > 0)
        assert post(stack, "/sleep?mode=abort").status_code == 200
        answer = running.result()
    assert answer.status_code == 503
    assert "the engine was put to sleep, which ended this call" in answer.text
    assert is_sleeping(stack)
    assert post(stack, "/wake_up").status_code == 200
    assert not is_sleeping(stack)


@pytest.mark.full
def test_keep_alive_of_ollama(stack: Stack) -> None:
    """An answer with keep_alive 0 is followed by sleep; a request without input loads or unloads."""
    chat = {"model": "tiny", "prompt": "hello", "raw": True, "options": {"num_predict": 2}, "stream": False}
    assert post(stack, "/api/generate", {**chat, "keep_alive": "0s"}).status_code == 200
    until(lambda: is_sleeping(stack))
    empty = {"model": "tiny", "messages": []}
    assert post(stack, "/api/chat", {**empty, "keep_alive": "10m"}).json()["done_reason"] == "load"
    assert not is_sleeping(stack)
    assert post(stack, "/api/chat", {**empty, "keep_alive": 0}).json()["done_reason"] == "unload"
    assert is_sleeping(stack)
    complete(stack)


@pytest.mark.full
def test_memory_stays_flat_over_a_hundred_sleeps(stack: Stack) -> None:
    """No process of the system grows with the number of sleeps, nor do files in memory or open files."""
    expected, sizes, files = text_of(complete(stack)), [], []
    for _ in range(100):
        assert post(stack, "/sleep").status_code == 200
        assert text_of(complete(stack)) == expected
        family = psutil.Process(stack.process.pid).children(recursive=True)
        found = [psutil.Process(stack.process.pid), *family]
        sizes.append([round(process.memory_info().rss / 2**20, 1) for process in found])
        files.append([process.num_fds() for process in found])
    print("MiB by process after 1, 10, 50, 100 sleeps:", *(sizes[at] for at in (0, 9, 49, 99)), sep="\n")
    print("open files:", *(files[at] for at in (0, 9, 49, 99)), sep="\n")
    assert len({len(one) for one in sizes}) == 1
    # The first rounds fill caches and pools; a leak of a page of KV or of weights in each would show.
    assert all(last - early < 16 for early, last in zip(sizes[9], sizes[99], strict=True))
    assert all(last - early < 16 for early, last in zip(files[9], files[99], strict=True))
