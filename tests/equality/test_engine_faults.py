"""Guards the engine under faults: what fails is reported, what can be replayed is, nothing hangs or leaks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import pytest
import torch

from gpu_service.core.request import EngineStopped, FinishReason, QueueFull, RequestRefused
from gpu_service.engine.damage import COMPUTE_AGAIN
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.resident.watch import ResidentWatch
from gpu_service.layers.context import ForwardContext
from tests.helpers.drafters import AnswerDrafter
from tests.helpers.engine_harness import LOOPS, FlakyExperts, make_request, prompt_of, running_engine
from tests.helpers.fake_model import VOCAB, FakeModel


def raise_at(calls: set[int], error: Exception):  # type: ignore[no-untyped-def]
    """A `before_forward` that raises at some forward calls, after the KV was written."""

    def before_forward(call: int) -> None:
        if call in calls:
            raise error

    return before_forward


@LOOPS
def test_lost_experts_do_not_show_in_the_tokens(loop: dict[str, Any]) -> None:
    """Steps replayed after a recovery give exactly the tokens of an undisturbed run, sampled ones too."""
    outputs = []
    for calls in (set[int](), {2, 3, 7, 12}):
        with running_engine(**loop, budget=16) as harness:
            harness.model.before_forward = raise_at(calls, ExpertUnavailable(0, "killed"))
            requests = [
                make_request(f"r{i}", prompt_of(i, 20), temperature=1.0, seed=i, presence_penalty=0.5)
                for i in range(3)
            ]
            outputs.append(harness.run(requests))
            assert harness.experts.recoveries == len(calls)
    assert outputs[0] == outputs[1]


class DamagedModel(FakeModel):
    """Writes wrong KV in the steps `first` to `last`, in which the damage is found."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.experts, self.first, self.last = FlakyExperts(), first, last

    def store(self, context: ForwardContext, rows: slice) -> None:
        super().store(context, rows)
        if self.first <= self.calls + 1 <= self.last:
            context.kv_cache.slots(0)[context.inputs.slot_mapping[rows], 0, 0] += 5
        if self.calls + 1 == self.last:
            self.experts.found += 1


@LOOPS
@pytest.mark.parametrize("drafts", [False, True])
def test_what_damaged_experts_computed_is_forgotten(loop: dict[str, Any], drafts: bool) -> None:
    """The step in which damage is found gives out nothing, nor does one launched after it; later tokens are
    those of sound memory, and so are those of another request with the same prompt."""
    prompts = [prompt_of(i, 20) for i in range(3)]
    with running_engine(**loop, budget=16) as harness:
        expected = harness.run([make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)])
    answers = {f"r{i}": tokens for i, tokens in enumerate(expected)}
    drafter: dict[str, Any] = (
        {"num_drafts": 2, "drafter": AnswerDrafter(answers, VOCAB, wrong_every=3)} if drafts else {}
    )
    for step in (1, 2, 5, 8, 9):
        model = DamagedModel(step, step)
        with running_engine(**loop, **drafter, budget=16, model=model, experts=model.experts) as harness:
            requests = [make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
            assert harness.run(requests, together=True) == expected
            assert model.experts.found == 1
            assert harness.run([make_request("again", prompts[0])]) == expected[:1]


class WatchOfNan:
    """Stands for the watch over experts on a device: finds those damaged that a step's NaN came from, which
    the next step begins without."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self.damages = 0
        self.compared: list[int] = []

    def suspect(self, noted: Collection[int], is_float16: bool) -> None:
        """Called by the engine before the step is answered."""
        self.compared += sorted(noted)
        self.damages = 1

    def begin_step(self) -> None:
        """The slot is filled again."""
        if self.damages:
            self._model.poison_token = -1

    def interrupt(self) -> None:
        """Does nothing."""


class NotingModel(FakeModel):
    """Notes rows that are not finite, as models do, as of one layer."""

    def read(self, context: ForwardContext) -> torch.Tensor:
        hidden_states = super().read(context)
        assert context.first_overflow is not None
        context.first_overflow[hidden_states.isnan().any(1)] = 7
        return hidden_states


@LOOPS
def test_nan_of_a_damaged_expert_on_the_device_reaches_no_client(
    loop: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is not answered, its requests have their tokens, and all pages are clean afterwards."""
    prompts = [[*prompt_of(i, 20), 96] for i in range(3)]
    with running_engine(**loop, num_pages=40) as harness:
        expected = harness.run([make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)])
    model = NotingModel()
    watch = WatchOfNan(model)
    knobs = {**loop, "num_pages": 40, "watch": cast(ResidentWatch, watch)}
    with running_engine(**knobs, model=model) as harness:
        model.poison_token = 96
        cleared: list[list[int]] = []
        zero_pages = harness.engine._runner.zero_pages
        monkeypatch.setattr(
            harness.engine._runner, "zero_pages", lambda pages: (cleared.append(pages), zero_pages(pages))
        )
        requests = [make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        assert harness.run(requests, together=True) == expected
        assert watch.damages == 1
        assert set(watch.compared) == {7}
        assert sorted(cleared[-1]) == list(range(1, 40))


@LOOPS
def test_tokens_after_a_damage_follow_from_those_given_out(loop: dict[str, Any]) -> None:
    """What clients were given before it was found stays; the rest follows from that, by sound experts."""
    model = DamagedModel(4, 7)
    with running_engine(**loop, model=model, experts=model.experts) as harness:
        (damaged,) = harness.run([make_request("damaged", prompt_of(1, 9))])
    with running_engine(**loop) as harness:
        (sound,) = harness.run([make_request("sound", prompt_of(1, 9))])
        assert damaged != sound
        # The last step that was answered wrongly is that before the find.
        given = damaged[:6]
        (rest,) = harness.run([make_request("rest", [*prompt_of(1, 9), *given], max_tokens=6)])
    assert damaged == [*given, *rest]


@LOOPS
def test_forgetting_by_an_operation_changes_no_token(loop: dict[str, Any]) -> None:
    """Several ranks forget between any two steps, and no token changes."""
    prompts = [prompt_of(i, 20) for i in range(3)]
    with running_engine(**loop, budget=16) as harness:
        expected = harness.run([make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)])
        requests = [make_request(f"a{i}", prompt) for i, prompt in enumerate(prompts)]
        harness.engine.submit(requests)
        for count in (0, 1, 5):
            harness.wait_tokens([requests[2]], count)
            harness.engine.call(COMPUTE_AGAIN).result(60)
        harness.wait(requests)
        assert [harness.tokens(request) for request in requests] == expected
        # Which of them were running at those moments is the machine's affair.
        assert any(request.num_preemptions for request in requests)


@LOOPS
def test_failed_recovery_ends_requests_but_not_the_engine(loop: dict[str, Any]) -> None:
    """Running requests end with an error that names the server; later ones are served, from clean pages."""
    with running_engine(**loop) as harness:
        (expected,) = harness.run([make_request("before", prompt_of(1, 20))])
        error = ExpertUnavailable(1, "still dead")
        harness.experts.recovery_error = error
        harness.model.before_forward = raise_at({harness.model.calls + 3}, error)
        lost = [make_request(f"lost{i}", prompt_of(i, 20)) for i in range(2)]
        harness.run(lost)
        assert {r.finish_reason for r in lost} == {FinishReason.ERROR}
        assert all("expert server 1: still dead" in r.error_message for r in lost)
        assert harness.run([make_request("early", prompt_of(1, 20))]) == [[]], "computed without its experts"
        harness.experts.recovery_error = None
        assert harness.run([make_request("after", prompt_of(1, 20))]) == [expected]


@LOOPS
def test_an_exception_in_a_step_fails_its_requests_only(loop: dict[str, Any]) -> None:
    """An unexpected error reaches the clients with its text, and the engine goes on."""
    with running_engine(**loop) as harness:
        harness.model.before_forward = raise_at({2}, RuntimeError("boom"))
        broken, fine = make_request("broken", prompt_of(1, 9)), make_request("fine", prompt_of(2, 9))
        harness.run([broken])
        assert broken.finish_reason is FinishReason.ERROR
        assert broken.error_message == "RuntimeError: boom"
        harness.run([fine])
        assert fine.finish_reason is FinishReason.LENGTH


@LOOPS
def test_an_exception_in_the_host_code_ends_requests_not_the_engine(
    loop: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduling or committing may have a bug: clients get an error, none hangs, the next is served."""
    with running_engine(**loop) as harness:
        scheduler = harness.engine.scheduler
        for index, name in enumerate(("schedule", "commit")):
            with monkeypatch.context() as patch:
                patch.setattr(scheduler, name, lambda *_, **__: 1 / 0)
                broken = make_request(f"broken{index}", prompt_of(1, 9))
                harness.run([broken])
            assert broken.finish_reason is FinishReason.ERROR
            assert "ZeroDivisionError" in broken.error_message
            fine = make_request(f"fine{index}", prompt_of(2, 9))
            harness.run([fine])
            assert fine.finish_reason is FinishReason.LENGTH


@LOOPS
def test_nan_fails_one_request_and_poisons_no_page(loop: dict[str, Any]) -> None:
    """The neighbours' tokens are unchanged, and the NaN pages are clean when someone else gets them."""
    with running_engine(**loop, prefix_caching=False, num_pages=24) as harness:
        good = [make_request(f"good{i}", prompt_of(i, 20)) for i in range(2)]
        expected = harness.run(good)
        harness.model.poison_token = 96
        bad = make_request("bad", [*prompt_of(3, 9), 96])
        again = [make_request(f"again{i}", prompt_of(i, 20)) for i in range(2)]
        tokens = harness.run([again[0], bad, again[1]])
        harness.model.poison_token = -1
        assert bad.finish_reason is FinishReason.ERROR
        assert "NaN or Inf" in bad.error_message
        assert [tokens[0], tokens[2]] == expected
        # A reader of a NaN fails; these go through every page of the pool.
        fill = [make_request(f"fill{i}", prompt_of(i, 40)) for i in range(4)]
        harness.run(fill)
        assert {request.finish_reason for request in fill} == {FinishReason.LENGTH}


@LOOPS
def test_abort_in_flight(loop: dict[str, Any]) -> None:
    """While a step computes, running and waiting outputs are aborted; the rest is not disturbed."""
    with running_engine(**loop, max_num_seqs=2) as harness:
        (expected,) = harness.run([make_request("alone", prompt_of(2, 9))])
        harness.model.gate.clear()
        requests = [make_request(f"r{i}", prompt_of(i, 9)) for i in range(4)]
        for request in requests:
            harness.engine.submit([request])
        harness.engine.abort("r0")
        harness.engine.abort("r3")
        harness.engine.abort("nobody")
        harness.model.gate.set()
        harness.wait(requests)
        reasons = [request.finish_reason for request in requests]
        assert reasons == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ABORT]
        assert harness.tokens(requests[2]) == expected


def test_stop_aborts_what_is_left() -> None:
    """A stopped engine leaves no caller waiting and no thread behind."""
    with running_engine(overlap=True, context_limit=200) as harness:
        request = make_request("long", prompt_of(1, 9), max_tokens=150)
        harness.engine.submit([request])
        harness.wait_tokens([request], 2)
        harness.engine.stop()
        assert request.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        with pytest.raises(EngineStopped, match="shutting down"):
            harness.engine.submit([make_request("late", [1])])


def test_refusals_are_immediate() -> None:
    """Neither an impossible request nor one too many reaches the queue."""
    with running_engine(max_waiting=1, max_num_seqs=1) as harness:
        with pytest.raises(RequestRefused, match="max_tokens"):
            harness.engine.submit([make_request("r", [1], max_tokens=1000)])
        with pytest.raises(RequestRefused, match="at most 1"):
            harness.engine.submit([make_request("r", [1]), make_request("s", [1])])
        harness.model.gate.clear()
        running, waiting = make_request("running", [1]), make_request("waiting", [1])
        harness.engine.submit([running])
        while running.scheduled_len == 0:
            harness.model.gate.wait(0.005)
        harness.engine.submit([waiting])
        with pytest.raises(QueueFull, match="at most 1"):
            harness.engine.submit([make_request("late", [1])])
        harness.model.gate.set()
        harness.wait([running, waiting])


def test_overlap_launches_before_the_last_token_is_known() -> None:
    """With the first step held back, a second one is launched although no token has arrived."""
    with running_engine(overlap=True) as harness:
        harness.model.gate.clear()
        request = make_request("r", prompt_of(1, 9))
        harness.engine.submit([request])
        while request.scheduled_len != 10:  # pytest's limit ends a wait for what does not come
            harness.model.gate.wait(0.005)
        assert request.output_token_ids == []
