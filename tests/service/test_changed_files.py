"""Guards what is answered when files of the model are replaced under a running server: the same text, or a
refusal that names the file; never other text, whichever process is started again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.prompts.worker import COMMAND
from tests.drills.checkpoint import FLAGS, MODEL, write_checkpoint
from tests.helpers.stack import Stack, running_stack
from tests.helpers.swapped_files import put, swap_tokens
from tests.helpers.waiting import wait_until

READY_S = 180.0
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}],
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
}


class Served:
    """A served checkpoint whose files are replaced."""

    def __init__(self, stack: Stack, model: Path) -> None:
        self.stack, self.model = stack, model
        self._right, self.fingerprint = self._texts(self.ask())
        self.tokenizer = (model / "tokenizer.json").read_bytes()

    def ask(self) -> httpx.Response | None:
        """Returns the answer's status; None: nothing listens there."""
        try:
            return httpx.post(f"{self.stack.base_url}/v1/chat/completions", json=BODY, timeout=60)
        except httpx.HTTPError:
            return None

    @staticmethod
    def _texts(answer: httpx.Response | None) -> tuple[str, str]:
        assert answer is not None
        found: dict[str, Any] = answer.json()
        return found["choices"][0]["message"]["content"], found["system_fingerprint"]

    def is_right(self) -> bool:
        """Returns whether a request is answered now; fails when it is with another text."""
        answer = self.ask()
        if answer is None or answer.status_code != 200:
            return False
        assert self._texts(answer) == (self._right, self.fingerprint)
        return True

    def why_not(self, path: str = "") -> str:
        """Returns the reason of a 503, of `path` or else of a chat; empty: another answer, which is the right
        one.
        """
        if path:
            try:
                answer: httpx.Response | None = httpx.get(f"{self.stack.base_url}{path}", timeout=10)
            except httpx.HTTPError:
                return ""
        else:
            answer = self.ask()
        if answer is None or answer.status_code == 200:
            assert path or answer is None or self._texts(answer)[0] == self._right
            return ""
        assert answer.status_code == 503, answer.text
        return str(answer.json()["error"]["message"])

    def prompt_processes(self) -> list[psutil.Process]:
        found = psutil.Process(self.stack.process.pid).children(recursive=True)
        those = [one for one in found if one.name() == COMMAND]
        # Without the one that they are forks of, and their own forks, which compile grammars.
        (server,) = (one for one in those if one.parent() not in those)
        return [one for one in those if one.parent() == server]

    def kill(self, *processes: psutil.Process) -> None:
        """kill -9."""
        for process in processes:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=30)

    def restore(self) -> None:
        """The right tokenizer is back, and so is the service."""
        put(self.model / "tokenizer.json", self.tokenizer)
        wait_until(self.is_right, READY_S)
        wait_until(lambda: not self.why_not("/ready"), READY_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("changed")
    model = write_checkpoint(directory / "model")
    flags = (*FLAGS, "--expert-servers", "1", "--prompt-workers", "2")
    with running_stack(model, directory, *flags, timeout_s=READY_S) as stack:
        yield Served(stack, model)


CHANGED = "tokenizer.json has changed since"


def test_prompt_processes_of_another_tokenizer_are_refused(served: Served) -> None:
    """The one that is left goes on with the right tokenizer, while /ready tells operators; with none left
    requests are refused by the file's name, and answered once it is back."""
    swap_tokens(served.model / "tokenizer.json")
    first, second = served.prompt_processes()
    served.kill(first)
    # Whose turn it is shows that it has gone.
    wait_until(lambda: served.is_right() and CHANGED in served.why_not("/ready"), READY_S)
    for _ in range(8):
        assert served.is_right()
    served.kill(second)
    wait_until(lambda: CHANGED in served.why_not(), READY_S)
    assert CHANGED in served.why_not("/ready")
    served.restore()


def test_a_gateway_of_another_tokenizer_is_refused(served: Served) -> None:
    """It is there, and says why it does not answer; so for as long as the file is another one."""
    swap_tokens(served.model / "tokenizer.json")
    served.kill(*served.stack.children("gateway"))
    wait_until(lambda: CHANGED in served.why_not(), READY_S)
    assert CHANGED in served.why_not("/ready")
    assert served.stack.process.poll() is None
    served.restore()


def test_an_engine_of_another_tokenizer_is_refused(served: Served) -> None:
    """Its grammars would be of other tokens. An expert server reads none, and is replaced as ever."""
    swap_tokens(served.model / "tokenizer.json")
    served.kill(*served.stack.children("expert"))
    wait_until(served.is_right, READY_S)
    served.kill(*served.stack.children("gpu"))
    wait_until(lambda: CHANGED in served.stack.log.read_text().rpartition("name=gpu")[2], READY_S)
    wait_until(lambda: CHANGED in served.why_not("/ready"), READY_S)
    served.restore()


# That times do not count is among the tests of test_identity.py.
@pytest.mark.full
def test_touched_files_are_the_same(served: Served) -> None:
    """Times do not count, nor does a copy in a file's place."""
    for file in served.model.iterdir():
        put(file, file.read_bytes())
    served.kill(*served.stack.children("gateway"), *served.stack.children("gpu"))
    wait_until(served.is_right, READY_S)


def test_the_fingerprint_is_of_answers_card_and_metrics(served: Served) -> None:
    """A client and an operator see the same one."""
    card = httpx.get(f"{served.stack.base_url}/v1/models").json()["data"][0]
    page = httpx.get(f"{served.stack.base_url}/metrics").text
    assert served.fingerprint.startswith("fp_")
    assert card["system_fingerprint"] == served.fingerprint
    line = f'moebius:model_info{{model_name="{MODEL}",system_fingerprint="{served.fingerprint}"}} 1.0'
    assert line in page


# Other files have another identity, of which it is made: test_identity.py.
@pytest.mark.full
def test_a_full_restart_serves_what_is_there(served: Served, tmp_path: Path) -> None:
    """A full restart serves the present files, with a fingerprint of its own."""
    other = write_checkpoint(tmp_path / "other")
    swap_tokens(other / "tokenizer.json")
    flags = (*FLAGS, "--expert-servers", "1")
    with running_stack(other, tmp_path, *flags, timeout_s=READY_S) as stack:
        answer = Served(stack, other)
    assert answer.fingerprint != served.fingerprint
