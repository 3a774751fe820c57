"""Guards `moebius top`: figures are differences of two answers, nothing unknown is zero, keys end it."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from app.cli import main
from app.client import Unreachable
from app.top.figures import figures_between
from app.top.run import Source, _single_keys, watch
from app.top.view import render
from gateway.web.live import live_object
from moebius.errors import UserError
from protos import engine_pb2 as pb
from tests.helpers.sse_server import scripted_server


def on_gpu(at: float, **changed: Any) -> dict[str, Any]:
    """`answer` of an engine whose GPU has one of two experts of each layer; others are copied at times."""
    found = answer(at, costs=costs(at), **changed)
    for layer in found["experts"]["layers"]:
        layer["gpu_experts"] = [1]
        layer["streamed"] = {"experts": 5 * at, "bytes": 4e9 * at}
        layer["fetched"] = {"experts": 6 * at, "bytes": 1e9 * at, "hits": 9 * at}
        layer["decode"] = {"choices": 40 * at, "hits": 10 * at}
        layer["exchanges"] = {"count": 3 * at, "bytes": 1e9 * at}
        layer["cpu_bytes"] = 6e9 * at
    return found


def costs(at: float) -> pb.LiveCosts:
    """Steps take a quarter more than predicted."""
    return pb.LiveCosts(
        predicted_seconds=0.72 * at,
        measured_seconds=0.9 * at,
        link_bytes_per_second=50e9,
        cpu_expert_seconds=17e-6,
        copy_price=4.25,
    )


def answer(at: float, **changed: Any) -> dict[str, Any]:
    """Returns what `/v1/live` says `at` seconds after the start: 10 steps a second, of which experts take 60
    ms.
    """
    steps = round(10 * at)
    load = {
        "version": "0.1.0",
        "num_running_reqs": 3,
        "num_used_tokens": 500,
        "max_total_num_tokens": 1000,
        "gen_throughput": 30.0,
        "max_running_requests": 8,
        "cache_hit_rate": 0.25,
        **changed.pop("load", {}),
    }
    server = {
        "index": 0,
        "is_up": True,
        "instance_id": 7,
        "busy_seconds": 0.6 * at,
        "weight_bytes": round(12e9 * at),
        "calibrated_bytes_per_second": 25e9,
        "weight_format": "int4_g32",
        "isa": "avx512",
        "num_threads": 16,
        "numa_node": 1,
        **changed.pop("server", {}),
    }
    layers = [
        pb.LiveLayer(layer=layer, cpu_rows=[1, 2], cpu_seconds=0.3 * at * (layer - 2), cpu_calls=steps)
        for layer in (3, 4)
    ]
    figures: dict[str, Any] = {
        "steps": steps,
        "step_seconds": 0.9 * at,
        "hand_off": pb.LiveHandOff(calls=2 * steps, wait_seconds=0.7 * at, seconds=0.1 * at),
        **changed,
    }
    live = pb.GetLiveResponse(
        load=pb.GetLoadResponse(**load),
        num_experts=2,
        top_k=1,
        layers=layers,
        servers=[pb.LiveExpertServer(**server)],
        first_token=pb.LiveTimes(count=4, p50=0.1, p95=0.4),
        **figures,
    )
    return {**live_object(live), "time": 1e9 + at, "model": "tiny", "replica": 0, "replicas": 1}


def test_figures_are_differences() -> None:
    """Two seconds: 20 steps of 90 ms, 60 ms of experts, 10 ms of hand-off in two calls, 12 of 25 GB/s."""
    figures = figures_between(answer(10), answer(12))
    assert figures.steps_per_second == pytest.approx(10)
    assert figures.step == pytest.approx(0.09)
    assert figures.experts_per_step == pytest.approx(0.06)
    assert figures.hand_off_per_step == pytest.approx(0.01)
    assert figures.hand_off_per_call == pytest.approx(0.005)
    assert figures.bytes_per_second == pytest.approx(12e9)
    assert figures.roofline_bytes_per_second == 25e9
    (server,) = figures.servers
    assert server is not None
    assert (server.busy_share, server.busy_bytes_per_second) == (pytest.approx(0.6), pytest.approx(20e9))
    assert server.of_roofline == pytest.approx(0.8)
    assert figures.layers == {3: pytest.approx(30_000), 4: pytest.approx(60_000)}


def test_what_is_not_known_is_none() -> None:
    """Figures are None before a second answer, of a restarted server, without a host-driven mailbox, and of
    old gateways.
    """
    assert figures_between(None, answer(10)).bytes_per_second is None
    restarted = figures_between(answer(10), answer(12, server={"instance_id": 8}))
    assert restarted.servers == [None]
    assert restarted.bytes_per_second is None
    on_gpu = figures_between(answer(10), answer(12, hand_off=None))
    assert on_gpu.hand_off_per_call is None
    old = [{key: value for key, value in answer(at).items() if key != "steps"} for at in (10, 12)]
    assert figures_between(*old).step is None
    engine_restarted = figures_between(answer(12), {**answer(1), "time": 2e9})
    assert (engine_restarted.step, engine_restarted.layers) == (None, {})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "CPU memory bandwidth: experts are 67% of a step, 80% of the roofline"),
        ({"server": {"calibrated_bytes_per_second": 100e9}}, "CPU cores: experts are 67% of a step, 20% of"),
        ({"server": {"calibrated_bytes_per_second": 0}}, "experts on the CPU: 67% of a step"),
        ({"step_seconds": 0.2}, "arriving work: steps take 20% of the time"),
        ({"load": {"num_running_reqs": 0}}, "nothing: no request is running"),
        ({"load": {"num_waiting_reqs": 4, "num_used_tokens": 990}}, "KV cache: it is full"),
        ({"load": {"num_waiting_reqs": 4, "num_running_reqs": 8}}, "--max-num-seqs: 8 requests run at once"),
        ({"busy": 0.2}, "the engine's own part (attention, dense layers): 67% of a step"),
        ({"busy": 0.2, "hand_off": 0.3}, "hand-off to expert servers: 33% of a step"),
    ],
)
def test_what_limits_the_step(changed: dict[str, Any], expected: str) -> None:
    """One cause, by the figures shown with it."""

    def at(seconds: float) -> dict[str, Any]:
        values = dict(changed)
        if "step_seconds" in values:
            values["step_seconds"] *= seconds
        if "busy" in values:
            values["server"] = {"busy_seconds": values.pop("busy") * seconds}
        if "hand_off" in values:
            values["hand_off"] = pb.LiveHandOff(calls=1, seconds=values["hand_off"] * seconds)
        return answer(seconds, **values)

    assert figures_between(at(10), at(12)).limit.startswith(expected)


def shown(now: dict[str, Any], before: dict[str, Any] | None, rows: int = 100, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(now, figures_between(before, now), rows, width=width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_it_fits_80_columns() -> None:
    """Nothing is cut off or wider; every figure is there."""
    lines = shown(answer(12), answer(10))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    for part in ("tiny", "30.0 output", "3 running, 0 waiting", "50% of 1,000 tokens", "90.0 ms (10.0/s)"):
        assert part in text
    assert "hand-off 10.0 ms (5000 µs each)" in " ".join(text.split())
    assert "12.00 of 25.0 GB/s" in text
    assert "node 1, 16 x avx512" in text
    assert any(line.lstrip().startswith("3 ████▌") for line in lines)


def test_draft_tokens_are_shown_where_there_are_some() -> None:
    """The acceptance rate since the start; no line where no draft token was verified."""
    load = {"draft_tokens": 1200, "accepted_tokens": 900}
    lines = shown(answer(12, load=load), answer(10, load=load))
    assert any("75% of 1,200 verified ones were accepted" in line for line in lines)
    assert not any("draft tokens" in line for line in shown(answer(12), answer(10)))


def test_a_narrow_terminal_cuts_no_number() -> None:
    """Lines are folded, columns that tell least are left out, layers stand in fewer columns."""
    now, before = answer(12), answer(10)
    for live in (before, now):
        layer = live["experts"]["layers"][0]
        live["experts"]["layers"] = [{**layer, "layer": number} for number in range(7)]
    lines = shown(now, before, width=60)
    assert max(map(len, lines)) <= 60
    found = next(line.split() for line in lines if line.startswith("server"))
    assert found == ["server", "where", "busy", "GB/s", "roofline", "of", "it"]
    assert any(line.endswith("%") and "25.0" in line for line in lines)
    layers = lines[next(place for place, line in enumerate(lines) if "by layer" in line) + 1 :]
    assert len(layers) == 4
    assert "…" not in "".join(layers)


def test_layers_without_room_are_the_slowest() -> None:
    """A heading says so."""
    before, now = answer(10), answer(12)
    for live in (before, now):
        layer = live["experts"]["layers"][0]
        live["experts"]["layers"] = [
            {**layer, "layer": number, "cpu_seconds": layer["cpu_seconds"] * (1 + number)}
            for number in range(60)
        ]
    lines = shown(now, before, rows=4)
    assert any("the slowest 12 of 60 layers" in line for line in lines)
    assert any(line.startswith(" 59 ") or "  59 " in line for line in lines)
    assert not any(line.startswith("  5 ") for line in lines)


def test_a_model_without_experts_and_a_silent_server() -> None:
    """Both are shown as what they are."""
    plain = {**answer(12), "experts": None}
    assert not any("CPU reads" in line for line in shown(plain, answer(10)))
    silent = answer(12, server={"is_up": False})
    assert any("does not answer" in line for line in shown(silent, answer(10)))


class Scripted(Source):
    """Answers, or what is raised instead."""

    def __init__(self, answers: Sequence[dict[str, Any] | UserError]) -> None:
        self.answers = list(answers)

    def ask(self) -> dict[str, Any]:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, UserError):
            raise found
        return found


def test_it_goes_on_when_the_server_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is away its last figures stay, with the reason; then they move again. `q` ends it."""
    output, looks = io.StringIO(), 0

    def press(seconds: float) -> str:
        nonlocal looks
        looks += 1
        return "q" if looks == 4 else ""

    class Keys:
        def __enter__(self) -> Any:
            return press

        def __exit__(self, *_: object) -> None:
            """Nothing to restore."""

    monkeypatch.setattr("app.top.run._single_keys", Keys)
    gone = Unreachable("cannot reach http://x: refused")
    console = Console(file=output, width=80, height=40, force_terminal=True)
    watch(Scripted([gone, answer(10), gone, answer(12)]), 0.1, console)
    frames = output.getvalue().split("cannot reach http://x: refused; trying again")
    assert len(frames) == 3
    assert "tiny" not in frames[0]
    assert "tiny" in frames[1]
    assert "90.0 ms" in frames[2]


def test_what_does_not_pass_ends_it() -> None:
    """A key that is missing is no reason to ask again."""
    with pytest.raises(UserError, match="401"):
        watch(Scripted([UserError("http://x answered 401: no key")]), 0.1, Console(file=io.StringIO()))


def test_keys_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Enter, and the terminal is as before afterwards."""
    import termios

    master, slave = pty.openpty()
    with os.fdopen(slave, "r") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        before = termios.tcgetattr(terminal)
        with _single_keys() as pressed:
            assert pressed(0.0) == ""
            threading.Timer(0.05, os.write, (master, b"q")).start()
            assert pressed(30.0) == "q"
        assert termios.tcgetattr(terminal) == before
    os.close(master)


def test_one_print_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """`--once` needs no terminal; `--json` has everything; refusals are one line."""
    with scripted_server([]) as server:
        server.documents["/v1/live?replica=0"] = answer(10)
        for option in ("--once", "--json"):
            with pytest.raises(SystemExit) as ended:
                main(["top", server.url, "--interval", "0.1", "--once", option])
            assert ended.value.code == 0
        text, _, document = capsys.readouterr().out.rpartition("\n{")
        assert "tiny" in text
        found = json.loads("{" + document)
        assert found["live"]["model"] == "tiny"
        assert found["figures"]["limit"]
        server.get_status = 404
        with pytest.raises(SystemExit):
            main(["top", server.url, "--once"])
        assert "answered 404" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["top", server.url, "--json"])
    assert "add --once" in capsys.readouterr().err


def test_what_is_known_of_each_layer() -> None:
    """Shares of its experts, hits of choices, exchanges and bytes per second, what servers read meanwhile."""
    figures = figures_between(on_gpu(10), on_gpu(12))
    third, fourth = figures.placement
    assert (third.layer, third.resident_share) == (3, 0.5)
    assert third.streamed_share == pytest.approx(5 / 10 / 2)
    assert third.fetched_per_step == pytest.approx(6 / 10)
    assert third.hit_rate == pytest.approx(0.25)
    assert third.exchanges_per_second == pytest.approx(3)
    assert third.copied_bytes_per_second == pytest.approx(6e9)
    # In 0.3 s of each.
    assert third.cpu_bytes_per_second == pytest.approx(20e9)
    assert (third.call_microseconds, fourth.call_microseconds) == (pytest.approx(30e3), pytest.approx(60e3))
    assert figures.link_bytes_per_second == pytest.approx(12e9)
    assert figures.link_share == pytest.approx(0.24)
    assert figures.predicted_share == pytest.approx(0.8)


def test_what_no_layer_has_is_unknown() -> None:
    """Figures are unknown of an engine that exchanges nothing, of an older one's answer, and after
    a restart.
    """
    (rate, _) = figures_between(answer(10), answer(12)).placement
    assert (rate.hit_rate, rate.exchanges_per_second, rate.cpu_bytes_per_second) == (None, None, None)
    assert rate.fetched_per_step is None
    older = answer(12)
    for layer in older["experts"]["layers"]:
        for name in ("streamed", "fetched", "decode", "exchanges", "cpu_bytes"):
            del layer[name]
    del older["costs"]
    figures = figures_between(older, {**older, "time": older["time"] + 1})
    assert (figures.placement[0].copied_bytes_per_second, figures.predicted_share) == (None, None)
    restarted = figures_between(on_gpu(12), {**on_gpu(1), "time": 2e9})
    assert restarted.placement[0].hit_rate is None
    assert restarted.link_bytes_per_second is None


def test_a_full_link_limits_the_step() -> None:
    """Copies take most of a step's time, whatever the CPUs do meanwhile."""
    before, now = on_gpu(10), on_gpu(12)
    now["costs"]["link_bytes_per_second"] = 14.4e9
    limit = figures_between(before, now).limit
    assert limit == "link to the GPU: copies of experts take 93% of a step"


def test_who_has_the_memory_is_shown() -> None:
    """The lines fit in 80 columns, without what has none; an older engine does not say."""
    memory = pb.LiveMemory(kv_bytes=3 * 2**29, expert_bytes=5 * 2**30, free_bytes=2**28, is_shared=True)
    lines = shown(on_gpu(12, memory=memory), on_gpu(10))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "KV pages 1.50, experts 5.00, free 0.25 GiB (pages and experts share)" in text
    assert "ring" not in text
    older = on_gpu(12)
    del older["memory"]
    assert not any("GPU memory" in line for line in shown(older, on_gpu(10)))


def test_tiers_of_the_prefix_cache_are_shown() -> None:
    """One row for those below the device, in 80 columns; none without them, and of an older engine."""
    tiers = [
        pb.CacheTier(name="device", tokens=5, bytes=2**30, total_bytes=2**31),
        pb.CacheTier(name="ram", tokens=4096, bytes=3 * 2**29, total_bytes=2**32, hit_tokens=1024),
        pb.CacheTier(name="disk", tokens=8192, bytes=2**31, total_bytes=2**33),
    ]
    lines = shown(on_gpu(12, tiers=tiers), on_gpu(10))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "below it RAM 4,096 tokens, 1.50 of 4.00 GiB, 1,024 hit; disk 8,192 tokens, 2.00 of 8.00" in text
    assert not any("below it" in line for line in shown(on_gpu(12, tiers=tiers[:1]), on_gpu(10)))
    older = on_gpu(12)
    del older["kv_cache"]["tiers"]
    assert not any("below it" in line for line in shown(older, on_gpu(10)))


def test_layers_of_a_gpu_are_a_table() -> None:
    """80 columns hold it; without room the slowest layers are shown; narrow terminals have the bars."""
    lines = shown(on_gpu(12), on_gpu(10))
    assert max(map(len, lines)) <= 80
    place = next(place for place, line in enumerate(lines) if line.startswith("experts, by layer"))
    assert lines[place + 1].split() == [
        *(
            "layer",
            "on",
            "GPU",
            "streamed",
            "fetch",
            "hits",
            "swaps/s",
            "MB/s",
            "CPU",
            "GB/s",
            "of",
            "it",
            "µs",
        )
    ]
    assert lines[place + 2].split() == [
        "3",
        "50%",
        "25%",
        "0.6",
        "25%",
        "3.0",
        "6000.0",
        "20.0",
        "80%",
        "30000",
    ]
    assert any("80% of what steps take" in line for line in lines)
    assert any("12.00 GB/s to the GPU of 50.0 (link)" in line for line in lines)
    assert any("the slowest 1 of 2 layers" in line for line in shown(on_gpu(12), on_gpu(10), rows=2))
    assert any("experts' time, by layer" in line for line in shown(on_gpu(12), on_gpu(10), width=60))


def test_experts_show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each layer, what experts cost, and the limit; as JSON, too."""
    with scripted_server([]) as server:
        path = "/v1/live?replica=0"
        monkeypatch.setattr("time.sleep", lambda _: server.documents.update({path: on_gpu(12)}))
        for option in ((), ("--json",)):
            server.documents[path] = on_gpu(10)
            with pytest.raises(SystemExit) as ended:
                main(["experts", "show", server.url, "--interval", "0.1", *option])
            assert ended.value.code == 0
        text, _, document = capsys.readouterr().out.rpartition("\n{")
        found = " ".join(text.split())
        assert "an expert and row 17 µs on the CPU; not measured on the GPU; link 50.0 GB/s" in found
        assert "a copy has to bring 4.2 choices" in found
        assert "limited by" in text
        layers = json.loads("{" + document)["layers"]
        assert [layer["layer"] for layer in layers] == [3, 4]
        assert layers[0]["resident_share"] == 0.5
        monkeypatch.setattr("time.sleep", lambda _: None)
        server.documents[path] = {**on_gpu(12), "experts": None}
        with pytest.raises(SystemExit):
            main(["experts", "show", server.url, "--interval", "0.1"])
        assert "tiny has no routed experts" in capsys.readouterr().err
