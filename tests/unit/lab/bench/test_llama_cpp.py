"""Guards the comparison with llama.cpp: both systems get the same prompts and settings, speeds count only
while all streams decode, and the ratio is over the better of llama.cpp's programs."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.client import StreamPiece
from lab.baselines import compare_llama_cpp, comparison_results, llama_cpp, serving_load
from lab.random_model.tensors import successor
from moebius.errors import UserError

VOCAB = 512


@pytest.fixture(scope="module")
def scripts() -> SimpleNamespace:
    """Returns the modules of the comparison."""
    return SimpleNamespace(
        llama_cpp=llama_cpp,
        serving_load=serving_load,
        comparison_results=comparison_results,
        compare_llama_cpp=compare_llama_cpp,
    )


def settings(llama_cpp: ModuleType, on_gpu: bool = True) -> Any:
    return llama_cpp.LlamaSettings(Path("bin"), Path("m.gguf"), 16, (4096, 8192), on_gpu, ("--numa", "x"))


def test_experts_stay_on_the_cpus_in_page_locked_memory(scripts: SimpleNamespace) -> None:
    """Both programs have experts on the CPUs, all else on the GPU, and read weights rather than
    mapping them.
    """
    server = settings(scripts.llama_cpp).server(8080, 64, 200)
    bench = settings(scripts.llama_cpp).bench((512, 4096), 64, 3)
    for command in (server, bench):
        line = " ".join(command)
        assert "-ngl 99 -fa on -lm none -t 16" in line
        assert line.endswith("--numa x")
    assert "-np 64 -c 12800 -b 4096 -ub 4096 --cpu-moe" in " ".join(server)
    assert "-p 512,4096 -n 64 -b 8192 -ub 4096,8192" in " ".join(bench)
    assert "-ncmoe 999" in " ".join(bench)
    assert "-ngl 0" in " ".join(settings(scripts.llama_cpp, on_gpu=False).server(8080, 1, 64))


def test_the_best_of_several_micro_batches_counts(scripts: SimpleNamespace) -> None:
    """llama-bench prints a line per setting; what it had printed when its time was over counts."""
    entries = [(512, 0, 10.0), (512, 0, 30.0), (4096, 0, 50.0), (0, 64, 7.0), (0, 64, 6.0)]
    lines = [json.dumps({"n_prompt": p, "n_gen": n, "avg_ts": speed}) for p, n, speed in entries]
    # Ended by its time limit in the middle of a line.
    found = scripts.llama_cpp.parse_bench("\n".join([*lines, '{"n_prompt": 16384, "avg']))
    assert (found.prefill, found.decode) == ({512: 30.0, 4096: 50.0}, 7.0)


def test_source_package_is_unpacked(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """The project lies below the package's folder; another package is refused by name."""
    for name, inside in (("right", "llama.cpp/ggml/x"), ("wrong", "src/x")):
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as archive:
            for file in (f"p-1/{inside}", "p-1/llama.cpp/CMakeLists.txt"):
                archive.addfile(tarfile.TarInfo(file), io.BytesIO())
    found = scripts.llama_cpp.unpack(tmp_path / "right.tar.gz", tmp_path / "a")
    assert found == tmp_path / "a" / "p-1" / "llama.cpp"
    with pytest.raises(UserError, match=r"wrong.tar.gz: no llama.cpp in it"):
        scripts.llama_cpp.unpack(tmp_path / "wrong.tar.gz", tmp_path / "b")


class ChainedServer:
    """Answers as a model with a chained head does, a token every few milliseconds."""

    def __init__(self, pause_s: float = 0.0, wrong_at: int = -1, streams: int = 1) -> None:
        self.bodies: list[dict[str, Any]] = []
        # All have their first token before any has its second: they decode together, however busy the host.
        self._begun = threading.Barrier(streams, timeout=60)
        self._pause_s, self._wrong_at = pause_s, wrong_at

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[StreamPiece]:
        self.bodies.append(body)
        token = np.array(body["prompt"][-1:])
        for number in range(body["max_tokens"]):
            if number == 1:
                self._begun.wait()
            time.sleep(self._pause_s)
            token = successor(token, VOCAB)
            yield StreamPiece(" w0" if number == self._wrong_at else f" w{token[0]}", None, None)
        yield StreamPiece("", body["max_tokens"], "length")


def test_generated_tokens_are_the_known_ones(scripts: SimpleNamespace) -> None:
    """One wrong token of eight shows, and keys that only one system knows reach that one."""
    load = scripts.serving_load
    for client, share in ((ChainedServer(streams=2), 1.0), (ChainedServer(wrong_at=3, streams=2), 7 / 8)):
        server = load.RunningServer(client, 1.0, {"cache_prompt": False})
        found = load.measure_decode(server, "model", load.Prompts(VOCAB), 2, 8, 2, length=16)
        assert found.correct == pytest.approx(share)
        assert all(body["cache_prompt"] is False and body["ignore_eos"] for body in client.bodies)
        prompts = [tuple(body["prompt"]) for body in client.bodies]
        assert len(set(prompts)) == len(prompts) == 4
    assert load.Prompts(VOCAB).draw(3, 20, 4) == load.Prompts(VOCAB).draw(3, 20, 4)


def test_decode_speed_counts_common_time_only(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of 10 tokens/s of which one begins a second later and ends a second later: 20 tokens/s."""
    load = scripts.serving_load
    streams = iter(
        load.Stream(begin, tuple((begin + 0.1 * k, k) for k in range(1, 31)), 30, 30) for begin in (0.0, 1.0)
    )
    monkeypatch.setattr(load, "ask", lambda *_: next(streams))
    server = load.RunningServer(None, 1.0)
    found = load.measure_decode(server, "model", load.Prompts(VOCAB), 2, 30, 1, length=4)
    assert found.tokens_per_second == pytest.approx(20, rel=0.03)


class FakeSystem:
    """Stands for both servers: every cell has a speed of its own, and some never end."""

    def __init__(self, load: ModuleType, speeds: dict[tuple[str, int], float], hangs: set[int]) -> None:
        self._load, self._speeds, self._hangs = load, speeds, hangs
        self.started = 0
        self.measured: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def start(self, _timeout_s: float) -> Iterator[tuple[Any, str]]:
        self.started += 1
        self._killed = threading.Event()
        yield self._load.RunningServer(None, 1.0, {}, self._killed.set), ""

    def measure(self, _server: Any, key: Any) -> Any:
        self.measured.append(tuple(key))
        if key.size in self._hangs:
            assert self._killed.wait(60)
            raise UserError("connection reset")
        return self._load.Measured(self._speeds[tuple(key)], (self._speeds[tuple(key)],), 1.0)


def options(scripts: SimpleNamespace, **changed: Any) -> Any:
    given = {
        "model": Path("m.gguf"),
        "llama": settings(scripts.llama_cpp),
        "device": "cpu",
        "prefill": (512,),
        "streams": (1, 8),
        "decode_prompt": 4,
        "decode_tokens": 8,
        "repeats": 1,
        "ready_timeout_s": 60.0,
        "cell_s": 60.0,
        "budget_s": 600.0,
        "systems": ("llama-server", "moebius"),
        "serve": (),
        "logs": Path(),
    }
    return scripts.compare_llama_cpp.Options(**given | changed)


def measure_all(
    scripts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    results: Any,
    system: FakeSystem,
    **changed: Any,
) -> None:
    """Both servers' cells, as the script's loop does it."""
    compare, chosen = scripts.compare_llama_cpp, options(scripts, **changed)
    monkeypatch.setattr(compare, "ask", lambda *_: None)
    monkeypatch.setattr(
        compare.Comparison, "_measured", lambda _self, server, key: system.measure(server, key)
    )
    comparison = compare.Comparison(chosen, scripts.serving_load.Prompts(VOCAB), results)
    for load in compare.loads_of(chosen):
        comparison.measure(compare.Load(load.system, load.keys, system.start))


SPEEDS = {("prefill", 512): 100.0, ("decode", 1): 40.0, ("decode", 8): 90.0}


def test_ratio_is_over_the_better_program(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """llama-bench counts where it measures the same: prefill, and one stream."""
    load, module = scripts.serving_load, scripts.comparison_results
    results = module.Results(tmp_path / "r.json", {})
    measure_all(scripts, monkeypatch, results, FakeSystem(load, SPEEDS, set()))
    results.add("llama-bench", module.Key("prefill", 512), load.Measured(200.0, (200.0,), 1.0))
    results.add("llama-bench", module.Key("decode", 1), load.Measured(10.0, (10.0,), 1.0))
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["ratio"] for row in rows] == [pytest.approx(value) for value in (0.5, 1.0, 1.0)]
    assert [row["llama_bench"] for row in rows] == [200.0, 10.0, 0.0]


def test_a_later_call_measures_only_what_is_missing(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run of ten minutes is cut off by the machine's limit; results of other settings are not mixed in."""
    module, file = scripts.comparison_results, tmp_path / "r.json"
    first = module.Results(file, {"tokens": 8})
    for system in ("llama-server", "moebius"):
        first.add(system, module.Key("prefill", 512), scripts.serving_load.Measured(5.0, (5.0,), 1.0))
    system = FakeSystem(scripts.serving_load, SPEEDS, set())  # type: ignore[assignment]
    results = module.Results(file, {"tokens": 8})
    measure_all(scripts, monkeypatch, results, system)
    assert system.measured == [("decode", 1), ("decode", 8)] * 2  # type: ignore[attr-defined]
    assert [row.moebius for row in results.rows()] == [5.0, 40.0, 90.0]
    with pytest.raises(UserError, match="other settings"):
        module.Results(file, {"tokens": 9})


def test_a_cell_that_takes_too_long_ends_and_the_others_are_measured(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server is killed, the cell counts as 0, and a server is started for the rest."""
    system = FakeSystem(scripts.serving_load, SPEEDS, {1})
    results = scripts.comparison_results.Results(None, {})
    measure_all(scripts, monkeypatch, results, system, cell_s=0.2)
    assert [row.moebius for row in results.rows()] == [100.0, 0.0, 90.0]
    assert results.rows()[1].ratio == 0.0
    assert system.started == 3 + 2  # llama.cpp has two kinds of server


def test_no_cell_begins_when_the_time_is_over(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that the end of the time cut off is left to the next call, which may give it more time."""
    system = FakeSystem(scripts.serving_load, SPEEDS, {8})
    results = scripts.comparison_results.Results(None, {})
    with pytest.raises(scripts.serving_load.TimeLimit):
        measure_all(scripts, monkeypatch, results, system, budget_s=1.0)
    assert ("llama-server", ("decode", 8)) not in results.cells


def test_only_models_with_known_answers_are_compared(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """A file whose greedy answers rounding may change says nothing about equal work."""
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UserError, match="--head chain"):
        scripts.compare_llama_cpp.check_model(tmp_path / "m.gguf")


def test_a_server_that_ends_is_named_with_its_last_words(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """The comparison does not wait for the time-out."""
    load = scripts.serving_load
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(UserError, match="no such model"),
        load.serving(command, load.free_port(), "/health", tmp_path / "log", 60.0, {}),
    ):
        pass
