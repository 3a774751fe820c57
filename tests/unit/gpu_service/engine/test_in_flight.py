"""Guards that a lost expert server never shows when the device drives the client.

The failure is found out one step late, with the next step launched after it on inputs that mean nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from gpu_service.core.request import EngineStopped, FinishReason, Request
from gpu_service.engine.step_runner import DeviceLost
from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from tests.helpers.device_experts import DoomedExperts, DoomedModel, Failure
from tests.helpers.engine_harness import make_request, prompt_of, running_engine

LOST = ExpertUnavailable(0, "killed")
REFUSED = ExpertComputeFailed("expert server 0: refused")
PENALISED = {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3}


def workload() -> list[Request]:
    """Returns short and long ones with penalties and seeds, more than there are slots: slots change hands."""
    return [
        make_request(f"r{i}", prompt_of(i, 5 + 9 * i), seed=i, max_tokens=4 + 3 * (i % 3), **PENALISED)
        for i in range(6)
    ]


def run(
    fails_at: Callable[[int], Failure | None], *, overlap: bool = True, requests: list[Request] | None = None
) -> tuple[list[list[int]], DoomedExperts, list[Request]]:
    """Returns the tokens of the workload in an engine whose experts fail at those steps (reruns count)."""
    experts = DoomedExperts(fails_at)
    wanted = workload() if requests is None else requests
    with running_engine(
        overlap=overlap,
        device_runner=True,
        budget=16,
        max_num_seqs=3,
        experts=experts,
        model=DoomedModel(experts),
    ) as harness:
        return harness.run(wanted, together=True), experts, wanted


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    return run(lambda step: None)[0]


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
@pytest.mark.parametrize("lost_at", [{1}, {4}, {3, 4, 5}, {2, 9, 14}, set(range(1, 30, 3))], ids=str)
def test_tokens_are_those_of_an_undisturbed_run(
    undisturbed: list[list[int]], lost_at: set[int], overlap: bool
) -> None:
    """Tokens agree with penalties (counted once per token however often a step runs), seeds, and reused
    slots.
    """
    tokens, experts, requests = run(lambda step: LOST if step in lost_at else None, overlap=overlap)
    assert tokens == undisturbed
    assert experts.recoveries >= 1
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}


def test_every_single_step_may_be_the_one(undisturbed: list[list[int]]) -> None:
    """The outcome is the same wherever the one failure falls."""
    steps = run(lambda step: None)[1].steps
    assert steps > 10
    for lost in range(1, steps + 1):
        assert run(lambda step, lost=lost: LOST if step == lost else None)[0] == undisturbed, lost


def test_replays_are_counted() -> None:
    """The step that failed, and the one after it, each ran once more."""
    experts = DoomedExperts(lambda step: LOST if step == 4 else None)
    seen: list[int] = []

    with running_engine(
        overlap=True, device_runner=True, experts=experts, model=DoomedModel(experts)
    ) as harness:
        observer = harness.engine._observer
        observer.committed = lambda batch, result, deltas: seen.append(result.num_replays)  # type: ignore
        harness.run([make_request("r", prompt_of(1, 9))])
    assert sum(seen) == 2
    assert experts.recoveries == 1


def test_servers_that_do_not_return_end_the_requests_not_the_engine() -> None:
    """Both steps in flight fail with the reason; the engine serves again once the servers are back."""
    experts = DoomedExperts(lambda step: LOST if step == 3 else None)
    with running_engine(
        overlap=True, device_runner=True, experts=experts, model=DoomedModel(experts)
    ) as harness:
        experts.recovery_error = ExpertUnavailable(1, "still dead")
        lost = [make_request(f"lost{i}", prompt_of(i, 9)) for i in range(2)]
        harness.run(lost)
        assert {r.finish_reason for r in lost} == {FinishReason.ERROR}
        assert all("expert server 1: still dead" in r.error_message for r in lost)
        experts.recovery_error = None
        fine = make_request("fine", prompt_of(4, 9))
        (tokens,) = harness.run([fine])
        assert fine.finish_reason is FinishReason.LENGTH
    assert [tokens] == run(lambda step: None, requests=[make_request("alone", prompt_of(4, 9))])[0]


def test_a_refused_request_fails_its_step_only() -> None:
    """What a living server refuses is not tried for ever; who comes later is served."""
    experts = DoomedExperts()
    with running_engine(
        overlap=True, device_runner=True, experts=experts, model=DoomedModel(experts)
    ) as harness:
        (expected,) = harness.run([make_request("before", prompt_of(4, 9))])
        harness.engine.flush().result(60)
        begun = experts.steps
        # The step fails whenever it is run: at first, alone, and the one after it alone.
        experts.fails_at = lambda step: REFUSED if step - begun in (2, 4, 5) else None
        broken = make_request("broken", prompt_of(1, 9))
        harness.run([broken])
        assert broken.finish_reason is FinishReason.ERROR
        assert "refused" in broken.error_message
        assert harness.run([make_request("after", prompt_of(4, 9))]) == [expected]


def test_a_refusal_met_by_the_next_step_fails_that_one_only(undisturbed: list[list[int]]) -> None:
    """The step before it had succeeded, and does again when both are run once more."""
    tokens, _, requests = run(lambda step: REFUSED if step == 5 else None)
    assert tokens == undisturbed, "a refusal that does not come again belongs to no request"
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}


def test_a_launch_broken_off_leaves_the_client_in_order() -> None:
    """An error of the host between a layer's submit and collect: the client starts over before the next."""
    experts = DoomedExperts()
    with running_engine(
        overlap=True, device_runner=True, experts=experts, model=DoomedModel(experts)
    ) as harness:
        (expected,) = harness.run([make_request("before", prompt_of(4, 9))])
        broken_call = harness.model.calls + 3

        def before_forward(call: int) -> None:
            if call == broken_call:
                raise RuntimeError("boom")

        harness.model.before_forward = before_forward
        broken = make_request("broken", prompt_of(1, 9))
        harness.run([broken])
        assert broken.error_message == "RuntimeError: boom"
        assert harness.run([make_request("after", prompt_of(4, 9))]) == [expected]
        assert experts.recoveries == 1


def test_a_lost_device_ends_the_engine_and_says_so() -> None:
    """Nothing can be computed any more: requests get an error, none is taken, our owner gets to know, and
    the log has the stack of what met it.
    """
    experts, reasons = DoomedExperts(), list[str]()
    with (
        running_engine(
            overlap=True, device_runner=True, experts=experts, model=DoomedModel(experts)
        ) as harness,
        capture_logs() as logs,
    ):
        harness.engine.on_lost = reasons.append

        def before_forward(call: int) -> None:
            if call >= 3:
                raise DeviceLost("unspecified launch failure")

        harness.model.before_forward = before_forward
        requests = [make_request(f"r{i}", prompt_of(i, 9)) for i in range(3)]
        harness.run(requests)
        assert {request.finish_reason for request in requests} == {FinishReason.ERROR}
        assert all("unspecified launch failure" in request.error_message for request in requests)
        assert len(reasons) == 1
        [line] = [line for line in logs if line["event"] == "the engine is lost"]
        trace = "".join(traceback.format_exception(line["exc_info"]))
        assert "before_forward" in trace
        with pytest.raises(EngineStopped):
            harness.engine.submit([make_request("late", prompt_of(1, 9))])
