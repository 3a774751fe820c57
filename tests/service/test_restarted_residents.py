"""Guards that an engine that is started again takes its residents from the memory of the expert servers."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.helpers.engine_process import write_one_layer
from tests.helpers.stack import Stack, running_stack
from tests.helpers.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.plain_http
FLAGS = ("--gpu-threads", "1", "--batch-dir", "off", "--expert-servers", "1")
RESIDENTS = ("--gpu-experts", "3", "--drop-resident", "keep", "--placement-strategy", "uniform")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A whole system whose servers hold all experts, some of them on the device, too."""
    directory = tmp_path_factory.mktemp("restarted")
    with running_stack(write_one_layer(directory / "tiny"), directory, *FLAGS, *RESIDENTS) as running:
        yield running


def text_of(stack: Stack) -> str:
    """Returns the answer to one completion, which waits for an engine that is not there."""
    body = {"model": "tiny", "prompt": [*range(3, 60)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        answers.append(httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=LIMIT_S))
        return answers[-1].status_code == 200

    wait_until(is_answered)
    return str(answers[-1].json()["choices"][0]["text"])


def loads(stack: Stack) -> list[tuple[str, str]]:
    """Returns the residents of each start, and how many were packed already."""
    pattern = r"resident experts loaded.* experts=(\d+).* packed_already=(\d+)"
    return re.findall(pattern, stack.log.read_text())


def is_settled(stack: Stack) -> bool:
    """Returns whether the supervisor has seen every process ready that it has started: who is killed before
    ends the start.
    """
    last = dict(re.findall(r"^(gpu|expert-0): (\w+)", stack.log.read_text(), re.MULTILINE))
    return last == {"gpu": "ready", "expert-0": "ready"}


def kill(stack: Stack, *commands: str) -> None:
    """Ends processes at once; their successors have other numbers."""
    wait_until(lambda: is_settled(stack))
    former = [child for command in commands for child in stack.children(command)]
    for child in former:
        child.send_signal(signal.SIGKILL)
    psutil.wait_procs(former, LIMIT_S)
    wait_until(lambda: all(stack.children(command) for command in commands))


def test_residents_are_copied_after_a_crash(stack: Stack) -> None:
    """None is packed while the servers have them; the answer is the same."""
    expected = text_of(stack)
    assert len(loads(stack)) == 1
    kill(stack, "gpu")
    assert text_of(stack) == expected
    (count, _), (again, copied) = loads(stack)
    assert again == copied == count != "0"


def test_engine_and_server_die_at_once(stack: Stack) -> None:
    """Wherever residents come from then, and whenever the server is back, the answer is the same."""
    expected, before = text_of(stack), len(loads(stack))
    kill(stack, "gpu", "expert")
    assert text_of(stack) == expected
    (count, _), *_, (again, copied) = loads(stack)
    assert again == count
    assert copied in ("0", count)
    assert len(loads(stack)) > before
