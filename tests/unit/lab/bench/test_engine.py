"""Guards the arithmetic of `moebius bench engine`: windows, experts touched, bounds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from app.bench.bounds import Bandwidths, StepTraffic, WeightBytes, bound_of, expected_distinct
from lab.bench.engine.drive import EngineUnderTest, Streams, TokenEvent, decode_window
from lab.bench.engine.measure import Setting, random_prompts, span, touched
from lab.bench.engine.run import EngineBenchOptions, with_room
from lab.bench.engine.servers import ExpertServers, ServerCounters, ServerInfo
from lab.bench.speculation import parse_percents, repeated
from moebius.config import MoebiusConfig
from moebius.config.loader import load_config
from moebius.errors import UserError
from moebius.models.geometry import MoeGeometry

if TYPE_CHECKING:
    from gpu_service.assembly.build import Built
    from gpu_service.core.request import Request

GEOMETRY = MoeGeometry("qwen3_moe", 8, 3, (1, 2), 10, 2, 4, "silu", "bfloat16")


def test_a_prompt_holds_its_output_except_for_a_share_of_its_tokens() -> None:
    """All of it, with the beginning again; at 20 percent about a fifth is drawn, the same in every call."""
    text = list(range(1000, 1400))
    assert repeated(text, 0, 3, 1000) == text + text[:3]
    changed = repeated(text, 20, 3, 1000)
    assert changed == repeated(text, 20, 3, 1000)
    assert changed[-3:] == text[:3]
    assert 50 < sum(one != other for one, other in zip(changed, text, strict=False)) < 110


@pytest.mark.parametrize("percents", ["", "100", "-1", "5,", "a"])
def test_percentages_that_are_refused(percents: str) -> None:
    """The refusal names the option; an output of which nothing is repeated is what other benches measure."""
    with pytest.raises(UserError, match="--changed"):
        parse_percents(percents, "--changed")


def test_a_stream_that_the_context_cannot_hold_is_an_error_of_the_user() -> None:
    """What the engine refuses ends the benchmark with one line that has the engine's reason in it."""
    from gpu_service.core.request import SchedulerLimits, refuse_impossible

    class Engine:
        def submit(self, requests: list[Request]) -> None:
            for request in requests:
                refuse_impossible(request.prompt_len, request.params.max_tokens, SchedulerLimits(8, 512, 128))

    engine = EngineUnderTest(cast("Built", SimpleNamespace(engine=Engine())))
    assert len(engine.submit([[5] * 100], 28, 0.0).request_ids) == 1
    with pytest.raises(UserError, match=r"stream of this benchmark.* 100 prompt tokens \+ 29 .*at most 28"):
        engine.submit([[5] * 100], 29, 0.0)


def setting(split: str, infos: list[ServerInfo], defer_experts: int = 0) -> Setting:
    config = load_config(None, {"expert_split": split, "defer_experts": defer_experts})
    weights = WeightBytes(0, 0, 10, 2)
    servers = ExpertServers(config)
    return Setting(GEOMETRY, weights, Bandwidths(1, None), servers, infos, 0, 100, 0.0, False)


def counters(calls: int, experts: int) -> ServerCounters:
    return ServerCounters(dict.fromkeys((1, 2), calls), dict.fromkeys((1, 2), experts), 0.0, {})


def test_window_is_when_all_streams_decode() -> None:
    """Stream 1 begins at 2 s, stream 0 ends at 5 s: tokens after 2 s up to 5 s count, those of 2 s do not."""
    events = [TokenEvent(1.0, 0, 1, False), TokenEvent(2.0, 0, 1, False), TokenEvent(2.0, 1, 1, False)]
    events += [
        TokenEvent(float(at), stream, 1, at == 5 and stream == 0) for at in (3, 4, 5) for stream in (0, 1)
    ]
    events += [TokenEvent(6.0, 1, 1, True)]
    window = decode_window(events, 2)
    assert (window.seconds, window.tokens, window.steps) == (3.0, 6, 3)
    assert window.tokens_per_second == 2.0


def test_streams_that_never_meet_are_refused() -> None:
    """One ends before the other begins: there is no speed of two streams."""
    with pytest.raises(ValueError, match="never decoded together"):
        decode_window([TokenEvent(1.0, 0, 1, True), TokenEvent(2.0, 1, 1, True)], 2)


def test_waiting_counts_streams_and_tells_errors() -> None:
    """All streams have to reach the count, or to have ended; a failed request is no token."""
    streams = Streams(0.0, 2)
    streams.add([TokenEvent(1.0, 0, 2, False), TokenEvent(1.5, 1, 1, True)])
    assert streams.wait(2) == 1.5
    streams.error = "no memory"
    with pytest.raises(UserError, match="no memory"):
        streams.wait(2)


def test_touched_experts_of_divided_experts() -> None:
    """Two servers hold half of every expert each: both count the same experts, the bytes add up."""
    infos = [ServerInfo(2000, 1, "scalar", 10), ServerInfo(1000, 1, "scalar", 10)]
    before, after = [counters(5, 10)] * 2, [counters(15, 45)] * 2
    found, nbytes = touched(before, after, setting("tensor", infos))
    assert found == 3.5
    assert nbytes == pytest.approx(3.5 * 2 * (2000 + 1000) / 20)


def test_touched_experts_of_whole_experts() -> None:
    """Servers hold different experts: what they count adds up to the layer's."""
    infos = [ServerInfo(1200, 1, "scalar", 6), ServerInfo(800, 1, "scalar", 4)]
    before = [counters(0, 0), counters(0, 0)]
    after = [counters(10, 20), counters(10, 5)]
    found, nbytes = touched(before, after, setting("expert", infos))
    assert found == 2.5
    assert nbytes == pytest.approx(2 * (2 * 100 + 0.5 * 100))


def test_layers_without_calls_read_nothing() -> None:
    """Whole layers on the GPU never call a server; the mean is over all MoE layers."""
    infos = [ServerInfo(2000, 1, "scalar", 10)]
    before = [ServerCounters({1: 0}, {1: 0}, 0.0, {})]
    after = [ServerCounters({1: 10}, {1: 40}, 0.0, {})]
    found, nbytes = touched(before, after, setting("tensor", infos))
    assert found == 2.0
    assert nbytes == pytest.approx(4 * 100)


def test_late_experts_are_calls_of_the_same_step() -> None:
    """A layer with late experts calls twice a step; the experts of both calls are the step's."""
    infos = [ServerInfo(2000, 1, "scalar", 10)]
    before = [ServerCounters({1: 0, 2: 0}, {1: 0, 2: 0}, 0.0, {})]
    after = [ServerCounters({1: 20, 2: 10}, {1: 40, 2: 40}, 0.0, {})]
    found, nbytes = touched(before, after, setting("tensor", infos, defer_experts=1))
    assert found == 4.0
    assert nbytes == pytest.approx(2 * 4 * 100)


def test_bounds_add_what_follows_and_overlap_what_does_not() -> None:
    """Dense work comes before the experts; resident experts are computed while the servers compute theirs."""
    traffic = StepTraffic(cpu_experts=100.0, gpu_experts=3000.0, dense=2000.0)
    assert bound_of(traffic, Bandwidths(100.0, 1000.0)).step == 2.0 + 3.0
    assert bound_of(replace(traffic, gpu_experts=0.0), Bandwidths(100.0, 1000.0)).step == 2.0 + 1.0
    assert bound_of(traffic, Bandwidths(100.0, None)).step == pytest.approx(51.0)


def test_expected_distinct_experts() -> None:
    """One row touches top_k, very many all of them."""
    assert expected_distinct(128, 8, 1) == pytest.approx(8)
    assert expected_distinct(128, 8, 10_000) == pytest.approx(128)


def test_prompts_share_no_prefix() -> None:
    """Random, different from stream to stream and run to run, without special ids."""
    prompts = random_prompts(4, 32, 512, 1)
    assert len({tuple(prompt[:4]) for prompt in prompts + random_prompts(4, 32, 512, 2)}) == 8
    assert min(map(min, prompts)) >= 3


def test_room_for_all_streams() -> None:
    """Slots and graphs are enlarged, never reduced."""
    options = EngineBenchOptions(streams=(1, 300))
    gpu = with_room(MoebiusConfig(), options).gpu
    assert (gpu.max_num_seqs, gpu.cuda_graph_max_batch_size) == (300, 300)
    assert with_room(MoebiusConfig(), EngineBenchOptions(streams=(1,))).gpu == MoebiusConfig().gpu.model_copy(
        update={"max_num_seqs": 64}
    )
    with pytest.raises(UserError, match=r"--fetch: \['on'\] are not allowed; allowed: auto, off"):
        with_room(MoebiusConfig(), EngineBenchOptions(streams=(1,), fetch=("auto", "on")))
    with pytest.raises(UserError, match="--max-tokens: 4"):
        with_room(MoebiusConfig(), cast("EngineBenchOptions", replace(options, max_tokens=4)))  # type: ignore[redundant-cast]


def test_a_span_counts_what_came_in_it() -> None:
    """Tokens of all streams within a time, and the longest wait of one, also where a bound cuts it off."""
    events = [TokenEvent(at, stream, 1, False) for at in (1.0, 2.0, 3.0, 6.0) for stream in (0, 1)]
    events.append(TokenEvent(6.5, 0, 1, False))
    rate, longest = span(events, 1.5, 7.0)
    assert rate == pytest.approx(7 / 5.5)
    assert longest == 3.0
    assert span(events, 3.0, 5.5) == (0.0, 2.5)
