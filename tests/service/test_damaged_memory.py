"""Guards the whole system while memory changes under it: what clients get, and what operators see."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moebius.kernels.weight_segment import WeightSegment, segment_path
from tests.drills.checkpoint import FLAGS, GreedyCase, greedy_cases, write_checkpoint
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.damaged_memory import FORGOTTEN, REFUSED, REPAIRED, flip_bits, put_nan, segment_of
from tests.helpers.expert_cluster import READY_S, compute, random_routing, running_cluster
from tests.helpers.stack import Stack, running_stack
from tests.helpers.waiting import wait_until


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    """Two servers that compare all of their experts every second."""
    directory = tmp_path_factory.mktemp("damaged")
    model = write_checkpoint(directory / "model")
    flags = [*FLAGS, "--expert-servers", "2", "--verify-interval-s", "1", "--expert-metrics-port", "0"]
    with running_stack(model, directory, *flags) as stack:
        yield stack, model


@pytest.fixture(scope="module")
def case(served: tuple[Stack, Path]) -> GreedyCase:
    """Returns a greedy request and its text."""
    return greedy_cases(served[0].base_url, 1, 24)[0]


def ask(stack: Stack, case: GreedyCase) -> httpx.Response:
    return httpx.post(f"{stack.base_url}/v1/chat/completions", json=case.body, timeout=120)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def ready(stack: Stack) -> str:
    return httpx.get(f"{stack.base_url}/ready", timeout=30).text


def count(stack: Stack, line: str) -> int:
    return stack.log.read_text().count(line)


def test_flipped_bits_are_found_and_forgotten(served: tuple[Stack, Path], case: GreedyCase) -> None:
    """Damage is found in the background, within the interval: a line, then the texts of before, whose
    prefixes were computed with the damaged expert, too.
    """
    stack, _ = served
    before = count(stack, REPAIRED)
    flip_bits(segment_of(stack.state_dir, 0), 1, 2, count=8)
    while count(stack, REPAIRED) == before:
        with contextlib.suppress(httpx.HTTPError):
            ask(stack, case)
    assert text(ask(stack, case)) == case.text
    assert text(ask(stack, case)) == case.text
    assert count(stack, REPAIRED) == before + 1
    assert re.search(rf"{REPAIRED}.*expert=2 layer=1", stack.log.read_text())


def test_nan_is_never_answered(served: tuple[Stack, Path], case: GreedyCase) -> None:
    """The request that meets it waits for the repair, and has its text."""
    stack, _ = served
    before = count(stack, REPAIRED)
    for server, layer, expert in ((0, 0, 5), (1, 1, 0)):
        put_nan(segment_of(stack.state_dir, server), layer, expert)
        assert text(ask(stack, case)) == case.text
    wait_until(lambda: count(stack, REPAIRED) == before + 2)
    assert count(stack, FORGOTTEN) >= 1


def test_a_server_that_returns_uses_nothing_unseen(served: tuple[Stack, Path], case: GreedyCase) -> None:
    """Memory that changed while the server was away: the first answer after its return is right."""
    stack, _ = served
    before = count(stack, REPAIRED)
    segment = segment_of(stack.state_dir, 0)
    stack.children("expert")[0].send_signal(signal.SIGKILL)
    for layer in (0, 1):
        flip_bits(segment, layer, 3, count=8)
    assert text(ask(stack, case)) == case.text
    wait_until(lambda: count(stack, REPAIRED) >= before + 2)


def test_without_its_checkpoint_requests_and_probes_say_why(
    served: tuple[Stack, Path], case: GreedyCase
) -> None:
    """An error and a line that name the expert, `/ready` 503; once the files are back all is well."""
    stack, model = served
    shutil.move(model, model.with_name("kept"))
    try:
        put_nan(segment_of(stack.state_dir, 0), 1, 4)
        answer = ask(stack, case)
        assert answer.status_code == 500, answer.text
        assert "layer 1: expert 4 is damaged in memory" in answer.text
        wait_until(lambda: httpx.get(f"{stack.base_url}/ready", timeout=30).status_code == 503)
        wait_until(lambda: "layer 1, expert 4 is damaged in memory" in ready(stack))
        assert count(stack, REFUSED) == 1
    finally:
        shutil.move(model.with_name("kept"), model)
    wait_until(lambda: httpx.get(f"{stack.base_url}/ready", timeout=30).status_code == 200)
    assert text(ask(stack, case)) == case.text


@pytest.mark.parametrize("transport", ["mailbox", "grpc"])
def test_an_engine_hears_of_damage_over_both_transports(tmp_path: Path, transport: str) -> None:
    """The engine hears of damage before the answer that waited for the repair, and of what cannot be
    repaired.
    """
    model = TinyMoe(num_experts=5, num_layers=3).write(tmp_path / "model")
    (tmp_path / "memory").mkdir()
    with running_cluster(model, tmp_path, expert_weights_dir=str(tmp_path / "memory")) as cluster:
        client = cluster.client(transport)
        routing = random_routing(cluster.geometry, 40)
        before = compute(client, 1, routing)
        assert client.damages() == 0
        segment = WeightSegment.open(segment_path(str(tmp_path / "memory"), 0))
        put_nan(segment, 1, 2)
        assert compute(client, 1, routing).equal(before)
        assert client.damages() == 1
        assert client.problem() == ""
        shutil.move(model, tmp_path / "kept")
        put_nan(segment, 1, 3)
        with pytest.raises(RuntimeError, match="layer 1: expert 3 is damaged in memory"):
            compute(client, 1, routing)
        wait_until(lambda: "layer 1, expert 3 is damaged in memory" in client.problem())
        shutil.move(tmp_path / "kept", model)
        client.recover(READY_S)
        wait_until(lambda: client.problem() == "")
        assert compute(client, 1, routing).equal(before)
        client.close()
