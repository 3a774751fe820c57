"""Guards `moebius bench engine` and those like it: whole runs on a small random model with real servers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.random_model import RandomModelOptions, write_random_model
from tests.helpers.command_line import run_cli
from tests.helpers.warm_processes import run_program


def test_engine_bench_end_to_end(tmp_path: Path) -> None:
    """Rows for 1 and 3 streams; one stream touches exactly top_k experts a layer, three touch more."""
    model, target = tmp_path / "model", tmp_path / "out.json"
    write_random_model(model, RandomModelOptions("tiny", "int4_g32"))
    command = ["-m", "moebius", "bench", "engine", str(model), "--streams", "1,3"]
    command += ["--prompt-len", "8", "--max-tokens", "24", "--prefill", "40", "--probe-mib", "16"]
    command += ["--expert-servers", "1", "--no-calibrate-kernels", "--device", "cpu", "--json", str(target)]
    ended = run_program(command)
    assert ended.returncode == 0, ended.stderr[-3000:]
    document = json.loads(target.read_text())
    one, three = document["decode"]
    assert (one["streams"], three["streams"]) == (1, 3)
    # A look at the counters may meet a call whose experts are counted and which is not itself: one of some 40
    assert one["cpu_experts_per_layer"] == pytest.approx(2.0, rel=0.06)
    assert 2.2 < three["cpu_experts_per_layer"] <= 6.4
    # int4 in groups of 32: 4.5 bits a weight, three matrices of 64 x 64; two experts in each of two layers.
    assert one["cpu_expert_bytes_per_step"] == pytest.approx(2 * 2 * 3 * 64 * 64 * 4.5 / 8, rel=0.3)
    assert one["tokens_per_second"] > 0
    assert document["prefill"][0]["prompt_len"] == 40
    assert "experts/layer" in ended.stdout
    assert document["host"]["command"][:3] == ["moebius", "bench", "engine"]
    assert document["host"]["gpu"] is None
    assert document["host"]["versions"]["torch"]


@pytest.mark.full
def test_prefill_bench_end_to_end(tmp_path: Path) -> None:
    """All experts of both layers are copied for each step of a prompt; on the servers none are."""
    model, target = tmp_path / "model", tmp_path / "out.json"
    write_random_model(model, RandomModelOptions("tiny", "int4_g32"))
    command = ["-m", "moebius", "bench", "prefill", str(model), "--lengths", "20,40"]
    command += ["--modes", "cpu,stream", "--repeats", "2", "--max-num-batched-tokens", "32"]
    command += ["--expert-servers", "1", "--no-calibrate-kernels", "--device", "cpu", "--json", str(target)]
    ended = run_program(command)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = json.loads(target.read_text())["prefill"]
    assert [(row["mode"], row["prompt_len"], row["streamed_steps"]) for row in rows] == [
        ("cpu", 20, 0),
        ("cpu", 40, 0),
        ("stream", 20, 1),
        ("stream", 40, 2),
    ]
    assert rows[0]["streamed_bytes"] == 0
    assert rows[0]["fraction_of_link"] is None
    assert rows[0]["expert_busy"] > rows[2]["expert_busy"]
    # Eight experts in each of two layers.
    assert rows[2]["streamed_bytes"] == pytest.approx(2 * 8 * 3 * 64 * 64 * 4.5 / 8, rel=0.3)
    assert rows[3]["streamed_bytes"] == 2 * rows[2]["streamed_bytes"]
    assert 0 < rows[3]["fraction_of_link"] < 1


@pytest.mark.full
def test_placement_bench_end_to_end(tmp_path: Path) -> None:
    """Several engines in turn on the same servers; at 50 % half of the experts chosen are the device's."""
    model, target = tmp_path / "model", tmp_path / "out.json"
    write_random_model(model, RandomModelOptions("tiny", "bfloat16", skew="zipf:1.2"))
    command = ["-m", "moebius", "bench", "placement", str(model), "--ratios", "0,50,100"]
    command += ["--strategies", "uniform,frequency", "--prompt-len", "8", "--max-tokens", "24"]
    command += ["--probe-mib", "16", "--streams", "2", "--expert-servers", "1", "--no-calibrate-kernels"]
    command += ["--device", "cpu", "--json", str(target)]
    ended = run_program(command)
    assert ended.returncode == 0, ended.stderr[-3000:]
    points = {
        (point["strategy"], point["ratio_percent"]): point["decode"]
        for point in json.loads(target.read_text())["points"]
    }
    assert len(points) == 6
    assert points["uniform", 0] == points["frequency", 0]
    assert points["uniform", 0]["gpu_experts_per_layer"] == 0
    assert points["uniform", 100]["cpu_experts_per_layer"] == 0
    assert points["uniform", 100]["gpu_experts_per_layer"] > 2
    # The four of eight experts that a skewed router likes best are chosen more often than the other four.
    assert (
        points["frequency", 50]["cpu_experts_per_layer"] < points["uniform", 0]["cpu_experts_per_layer"] / 2
    )
    assert "| 50 % |" in ended.stdout


@pytest.mark.full
def test_speculation_bench_end_to_end(tmp_path: Path) -> None:
    """Drafts are accepted where the prompt holds the chain, in part where it differs; outputs are equal."""
    model, target = tmp_path / "model", tmp_path / "out.json"
    write_random_model(model, RandomModelOptions("small", "int4_g32", head="chain"))
    command = ["-m", "moebius", "bench", "speculation", str(model), "--streams", "2"]
    command += ["--changed", "0,50", "--text-len", "128", "--probe-mib", "16", "--no-adaptive-drafts"]
    command += ["--expert-servers", "1", "--no-calibrate-kernels", "--device", "cpu", "--json", str(target)]
    ended = run_program(command)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = json.loads(target.read_text())["rows"]
    assert [(row["method"], row["changed_percent"]) for row in rows] == [
        ("off", 0),
        ("off", 50),
        ("ngram", 0),
        ("ngram", 50),
    ]
    plain, _, whole, half = rows
    assert plain["tokens_per_step"] == 1.0
    assert plain["draft_tokens_per_step"] == 0.0
    assert plain["accepted_share"] is None
    assert whole["tokens_per_step"] > 3
    assert whole["accepted_share"] == pytest.approx(1.0, abs=0.02)
    assert 1 < half["tokens_per_step"] < 2.5
    assert half["accepted_share"] < whole["accepted_share"]
    assert whole["same_outputs"]
    assert half["same_outputs"]
    assert whole["speedup"] == pytest.approx(whole["tokens_per_second"] / plain["tokens_per_second"])


@pytest.mark.full
def test_speculation_bench_of_a_models_own_drafts(tmp_path: Path) -> None:
    """MTP layers are right as often as they were written to be; outputs are the same."""
    model, target = tmp_path / "model", tmp_path / "out.json"
    write_random_model(
        model, RandomModelOptions("glm-4.5-air-tiny", "int4_g32", head="chain", mtp_acceptance=80)
    )
    command = ["-m", "moebius", "bench", "speculation", str(model), "--streams", "2"]
    command += ["--speculative-method", "mtp", "--num-draft-tokens", "1", "--no-adaptive-drafts"]
    command += ["--text-len", "256", "--probe-mib", "16", "--expert-servers", "1", "--no-calibrate-kernels"]
    command += ["--device", "cpu", "--json", str(target)]
    ended = run_program(command)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = json.loads(target.read_text())["rows"]
    # What prompts repeat is nothing to this method: a row for each number of streams.
    assert [(row["method"], row["changed_percent"]) for row in rows] == [("off", 0), ("mtp", 0)]
    speculative = rows[1]
    assert speculative["accepted_share"] == pytest.approx(0.8, abs=0.1)
    assert speculative["tokens_per_step"] == pytest.approx(1 + speculative["accepted_share"], abs=0.05)
    assert speculative["same_outputs"]


def test_steps_bench_needs_a_gpu(tmp_path: Path) -> None:
    """On a CPU the command says so, in one line, before anything starts."""
    model = tmp_path / "model"
    write_random_model(model, RandomModelOptions("tiny"))
    status, _, err = run_cli("bench", "steps", model, "--device", "cpu")
    assert status == 2
    assert err.strip().splitlines() == [
        "moebius: error: moebius bench steps looks at a GPU's work; there is none here, or device is 'cpu'"
    ]


def test_a_lost_server_ends_the_bench(tmp_path: Path) -> None:
    """It is not restarted here: the process says who ended and leaves, even while its main thread waits."""
    program = (
        "import sys, time, psutil\n"
        "from lab.bench.engine.servers import running_servers\n"
        "from moebius.config.loader import load_config\n"
        "flags = {'model': sys.argv[1], 'expert_servers': 1, 'calibrate_kernels': False}\n"
        "with running_servers(load_config(None, flags)):\n"
        "    for child in psutil.Process().children():\n"
        "        child.kill()\n"
        "    time.sleep(200)\n"
    )
    model = tmp_path / "model"
    write_random_model(model, RandomModelOptions("tiny"))
    command = [sys.executable, "-c", program, str(model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert "expert-0 ended: " in ended.stderr


# Short sleeps: see tests/unit/app/test_exits.py.
SIGNALLED = """
import sys, time
from lab.bench.engine import servers
from app.exits import exit_with
from moebius.config.loader import load_config

def wait(supervisor):
    print("mailbox:", *(segment.name for segment in supervisor._plan.segments), flush=True)
    while True:
        time.sleep(0.01)

def run():
    flags = {"model": sys.argv[1], "expert_servers": 1, "calibrate_kernels": False}
    with servers.running_servers(load_config(None, flags)) as running:
        print("mailbox:", running.config.experts.mailbox, flush=True)
        while True:
            time.sleep(0.01)

if sys.argv[2] == "loading":
    servers.Supervisor.wait_ready = wait
exit_with(run)
"""


@pytest.mark.parametrize("moment", ["loading", "running"])
def test_a_signal_ends_the_bench(tmp_path: Path, moment: str) -> None:
    """Two signals at once, before servers are ready or after: they are stopped in order, no shared memory
    stays, and nothing is said."""
    model = tmp_path / "model"
    write_random_model(model, RandomModelOptions("tiny"))
    command = [sys.executable, "-c", SIGNALLED, str(model), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # Whatever is logged comes before it.
        mailbox = next(line for line in process.stdout if line.startswith("mailbox:")).split()[1]
        assert Path("/dev/shm", mailbox).is_file()
        process.terminate()
        time.sleep(0.001)
        process.terminate()
        _, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (143, "")
    assert not Path("/dev/shm", mailbox).exists()


@pytest.mark.full
def test_mask_bench_end_to_end(tmp_path: Path) -> None:
    """A row for none, half and all of the streams, on a checkpoint without a tokenizer."""
    model, target = tmp_path / "model", tmp_path / "out.json"
    write_random_model(model, RandomModelOptions("tiny", "int4_g32"))
    command = [
        "-m",
        "moebius",
        "bench",
        "masks",
        str(model),
        "--streams",
        "2",
        "--rounds",
        "1",
    ]
    command += ["--prompt-len", "8", "--max-tokens", "24", "--expert-servers", "1", "--no-calibrate-kernels"]
    command += ["--device", "cpu", "--json", str(target)]
    ended = run_program(command)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = json.loads(target.read_text())
    assert [row["constrained"] for row in rows] == [0, 1, 2]
    assert all(row["step_seconds"] > 0 for row in rows)
    assert rows[0]["step_seconds"] == rows[0]["unconstrained_step_seconds"]


@pytest.mark.full
def test_memory_bench_end_to_end(tmp_path: Path) -> None:
    """An engine that lends memory has more of it for pages while the prompt is there, at experts' cost; one
    with a fixed split has what that needed all the time, and no more bytes in all.
    """
    model, target = tmp_path / "model", tmp_path / "out.json"
    write_random_model(model, RandomModelOptions("small"))
    command = ["-m", "moebius", "bench", "memory", str(model), "--prompt-len", "2000"]
    command += ["--streams", "2", "--before", "0.5", "--after", "0.5", "--gpu-experts-ratio", "0.9"]
    command += ["--kv-cache-gib", "0.002", "--max-num-batched-tokens", "64"]
    command += ["--expert-servers", "1", "--no-calibrate-kernels", "--device", "cpu", "--json", str(target)]
    ended = run_program(command)
    assert ended.returncode == 0, ended.stderr[-3000:]
    document = json.loads(target.read_text())
    elastic, fixed = document["rows"]
    assert (elastic["split"], fixed["split"]) == ("elastic", "fixed")
    assert elastic["most_kv_bytes"] > elastic["kv_bytes_before"]
    assert elastic["least_experts"] < elastic["experts_before"]
    assert fixed["most_kv_bytes"] == fixed["kv_bytes_before"]
    assert fixed["experts_before"] < elastic["experts_before"]
    assert document["fraction_of_fixed"] == pytest.approx(elastic["decode_during"] / fixed["decode_during"])
    running = [point for point in document["series"] if point["prompt_is_running"]]
    assert {point["split"] for point in running} <= {"elastic", "fixed"}
    assert "experts back s" in ended.stdout
