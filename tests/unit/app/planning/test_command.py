"""Guards `moebius plan` and `serve --dry-run`: options, exit status, JSON, what is detected."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.planning.gpu_models import GPU_MODELS, parse_gpus
from app.planning.hardware import HardwareOptions, gpu_names
from app.planning.hardware import hardware as detect
from lab.random_model.shapes import parse_shape
from moebius.errors import UserError
from moebius.host.kernel_times import PanelTimes, this_host, times_file, write_times
from moebius.kernels import isa_level
from tests.helpers.plan_models import GIB, write_config

HOST = ("--ram", "16", "--sockets", "1", "--cores", "8", "--bandwidth", "100", "--isa", "amx")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of a small shape, no weights."""
    return write_config(tmp_path_factory.mktemp("plan") / "small", parse_shape("small", 0).hf_config(None))


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command line."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(exit_info.value.code or 0), captured.out, captured.err


def test_a_plan_is_printed_and_written(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    """Table and JSON say the same; every number of the hardware says where it comes from."""
    file = tmp_path / "plan.json"
    status, out, err = run_cli(
        capsys, "plan", model, "--gpus", "2x4090", *HOST, "--streams", "1,8", "--json", file
    )
    assert (status, err) == (0, "")
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["total"] == sum(part["nbytes"] for part in document["components"])
    assert set(document["totals"]) == {"GPU 0", "GPU 1", "RAM"}
    assert [row["rows"] for row in document["decode"]] == [1, 8]
    assert document["hardware"]["ram_bytes"] == 16 * GIB
    assert document["hardware"]["origin"]["bandwidth"] == "given"
    assert document["residency"]["count"] == 4 * 32
    for row in document["decode"]:
        assert f"decode {row['rows']}" in out
        assert f"{row['tokens_per_second']:.1f}" in out
    assert f"{document['totals']['RAM'] / GIB:.2f}" in out
    command = f"moebius serve {model} --tensor-parallel-size 2 --gpu-experts 32"
    assert f"serve with: {command}\n" in out


def test_a_plan_says_whether_kernels_were_measured(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server of as many threads kept is used and named; else, or if unreadable, assumptions are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("plan", model, "--gpus", "none", "--kv-cache-gib", "0.1", "--expert-threads", "3")
    file = tmp_path / "plan.json"

    def experts_seconds(*options: str) -> tuple[float, str]:
        status, out, err = run_cli(capsys, *arguments, *options, "--streams", "1", "--json", file)
        assert (status, err) == (0, "")
        return json.loads(file.read_text())["decode"][0]["seconds"]["cpu_experts"], " ".join(out.split())

    assumed, out = experts_seconds()
    assert "times of the expert kernels: assumed" in out
    on, points = this_host(3, isa_level()), ((1, 1e9),)
    times = [PanelTimes(on, "bfloat16", "bfloat16", k, points) for k in (64, 128)]
    write_times(times_file(), times)
    measured, out = experts_seconds("--expert-servers", "1")
    assert "times of the expert kernels: measured on this host" in out
    # Each panel takes a second and more.
    assert measured > 100 > assumed
    assert "kernels: assumed" in experts_seconds("--cores", "4")[1]
    times_file().write_text("{")
    again, out = experts_seconds()
    assert again == assumed
    assert "note: measured times of the expert kernels cannot be read" in out


def test_what_does_not_fit_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """Naming what is needed, what is allowed and what would do."""
    host = ("--gpus", "none", *HOST[2:], "--kv-cache-gib", "0.1")
    status, out, err = run_cli(capsys, "plan", model, *host, "--ram", "0.9")
    assert status == 1
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("moebius: does not fit: needs 1.2 GiB of RAM (")
    assert "0.9 GiB are allowed" in err


def test_evicted_prefixes_take_ram(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """`kv_offload_gib` is a part of the engine's RAM, and counts when it does not fit."""
    host = ("--gpus", "none", *HOST[2:], "--kv-cache-gib", "0.1", "--kv-offload-gib", "0.5")
    status, out, _ = run_cli(capsys, "plan", model, *host, "--ram", "4")
    assert status == 0
    (line,) = [one for one in out.splitlines() if "engine: evicted prefixes" in one]
    assert "0.50" in line
    status, _, err = run_cli(capsys, "plan", model, *host, "--ram", "1.3")
    assert status == 1
    assert "needs 1.7 GiB of RAM" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "7xnothing"), "--gpus: '7xnothing' is not allowed"),
        (("--gpus", "3"), "needed: --gpu-memory, --gpu-bandwidth, --gpu-tflops"),
        (("--isa", "sse2"), "--isa: 'sse2' is not allowed"),
        (("--streams", "0"), "--streams"),
        (("--context", "9999999"), "--context: 9999999 is not allowed"),
        (("--gpus", "none", "--device", "cuda"), "there is no GPU to plan with"),
        (("--gpus", "none", "--json", "/no/such/dir/x"), "--json /no/such/dir/x"),
        (("--gpu-experts", "99"), "gpu_experts: 99 is not allowed"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], model: Path, options: tuple[str, ...], message: str
) -> None:
    """One line and the status of every user error."""
    status, _, err = run_cli(capsys, "plan", model, *HOST, *options)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    """`serve --dry-run` plans with the settings as they are, on this host, and leaves no state behind."""
    state = tmp_path / "state"
    status, out, _ = run_cli(
        capsys, "serve", model, "--dry-run", "--kv-cache-gib", "0.1", "--state-dir", state
    )
    assert status == 0
    assert "experts of server 0" in out
    assert "Ready:" not in out
    assert not state.exists()


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("4090", 1, "RTX 4090"),
        ("2xH200", 2, "H200"),
        ("3080", 1, "RTX 3080"),
        ("rtx3080ti", 1, "RTX 3080 Ti"),
        ("5090laptop", 1, "RTX 5090 Laptop"),
        ("a100-40gb", 1, "A100 40GB"),
        ("rtx-pro-6000", 1, "RTX PRO 6000"),
        ("rtx 6000 ada", 1, "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 1, "RTX 4090 Laptop"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 1, "RTX 4070 Ti Super"),
        ("NVIDIA A100-SXM4-80GB", 1, "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", 1, "H100"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 1, "RTX PRO 6000 Max-Q"),
        ("Tesla T4", 1, "T4"),
        ("2x3090 + 4090", 3, "RTX 3090 + RTX 4090"),
    ],
)
def test_gpus_are_found_by_the_names_people_and_drivers_use(text: str, count: int, name: str) -> None:
    """A laptop's card, one with less memory and one of another make are never taken for a namesake."""
    number, model = parse_gpus(text)
    assert model is not None
    assert (number, model.name) == (count, name)


def test_every_gpu_is_found_by_its_own_name() -> None:
    """No row of the table hides another one."""
    assert all(parse_gpus(name) == (1, model) for name, model in GPU_MODELS.items())


@pytest.mark.parametrize(("gpus", "note"), [("4090+3090", "pipeline stages of"), ("3x4090", "of 3 GPUs 2")])
def test_a_plan_says_what_it_makes_of_such_gpus(
    capsys: pytest.CaptureFixture[str], model: Path, gpus: str, note: str
) -> None:
    """Unequal cards, and more than divide the model's heads, are not planned without a word."""
    status, out, _ = run_cli(capsys, "plan", model, "--gpus", gpus, *HOST)
    assert status == 0
    assert f"note: {note}" in " ".join(out.split())


def test_numbers_of_gpus() -> None:
    """A number is one of GPUs unless it is a GPU's name; there are none by name."""
    assert parse_gpus("none") == (0, None)
    assert parse_gpus("4") == (4, None)


def test_unequal_gpus_stand_for_the_least() -> None:
    """Ranks that share layers evenly have what the smaller of two cards has; stages have their own cards."""
    count, mixed = parse_gpus("5090+3090")
    assert mixed is not None
    first, second = GPU_MODELS["RTX 5090"], GPU_MODELS["RTX 3090"]
    assert count == 2
    assert mixed.memory_bytes == second.memory_bytes
    assert mixed.bandwidth == min(first.bandwidth, second.bandwidth)
    assert mixed.flops == min(first.flops, second.flops)
    assert mixed.kinds == (first, second)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("0xh200", "H200"),
        ("x", "such as"),
        ("h999", "H"),
        ("-1", "such as"),
        ("4099", "RTX 4090"),
        ("9999", "such as"),
    ],
)
def test_unknown_gpus_are_refused_with_the_nearest(wrong: str, nearest: str) -> None:
    """A card that is not in the table is not taken for another one, nor for a number of cards."""
    with pytest.raises(UserError, match="--gpus") as refused:
        parse_gpus(wrong)
    assert nearest in str(refused.value)


def test_the_command_repeats_what_was_given(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    """`serve with` is a whole command: MODEL, each setting that was given, and what the plan found."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    given = ("--expert-dtype", "int4", "--no-cuda-graphs", "--max-num-seqs", "4", "--split-shares", "1,2")
    host = ("--gpus", "h200", *HOST)
    arguments = ("plan", model, *host, "--expert-servers", "2", *given, "--json", first)
    status, out, err = run_cli(capsys, *arguments)
    assert (status, err) == (0, "")
    planned = json.loads(first.read_text())
    command = planned["serve_command"]
    assert f"serve with: {command}\n" in out
    program, verb, *words = shlex.split(command)
    assert (program, verb, words[0]) == ("moebius", "serve", str(model))
    assert {"int4", "--no-cuda-graphs", "1,2"} < set(words)
    assert run_cli(capsys, "plan", *words, *host, "--json", second)[0] == 0
    again = json.loads(second.read_text())
    assert again["serve_command"] == command
    assert again["settings"] == planned["settings"]
    assert again["residency"]["count"] == planned["residency"]["count"] > 0


def test_a_printed_command_has_no_key(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """`serve --dry-run` repeats what was given, but an API key does not appear on a terminal or in a log."""
    given = ("--kv-cache-gib", "0.1", "--api-key", "not-for-others", "--port", "8123")
    status, out, err = run_cli(capsys, "serve", model, "--dry-run", *given)
    assert status == 0
    assert "--port 8123" in out
    assert "not-for-others" not in out + err


def test_a_host_is_detected_from_its_files(tmp_path: Path) -> None:
    """Two GPUs by the driver's files, memory by the kernel's estimate within what the cgroup leaves."""
    for index, address in enumerate(("0000:01:00.0", "0000:02:00.0")):
        directory = tmp_path / "proc/driver/nvidia/gpus" / address
        directory.mkdir(parents=True)
        (directory / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/nvidia{index}").write_text("")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n")
    assert gpu_names(tmp_path) == ["NVIDIA H200", "NVIDIA H200"]
    found = detect(HardwareOptions(bandwidth_gbs=50, sockets=2), tmp_path)
    table = GPU_MODELS["H200"]
    assert found.gpu is not None
    assert (found.gpus, replace(found.gpu, memory_bytes=table.memory_bytes)) == (2, table)
    # Less than its maker counts: a driver keeps some of it from everybody.
    assert 1 * GIB < table.memory_bytes - found.gpu.memory_bytes < 2 * GIB
    assert found.ram_bytes == 8 * GIB
    assert found.bandwidth == 100e9
    assert found.origin["gpus"] == found.origin["ram"] == "detected"
    assert found.origin["gpu"] == "table"
    assert found.origin["cpu_flops"] == "assumed"
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text(f"{3 * GIB}\n")
    (cgroup / "memory.current").write_text(f"{GIB}\n")
    assert detect(HardwareOptions(), tmp_path).ram_bytes == 2 * GIB
    # Pages of files can be dropped; shared memory, which is among "file", can not.
    (cgroup / "memory.stat").write_text(f"file {GIB}\nactive_file {GIB // 2}\ninactive_file {GIB // 4}\n")
    assert detect(HardwareOptions(), tmp_path).ram_bytes == 2 * GIB + 3 * GIB // 4
    (cgroup / "memory.max").write_text("max\n")
    assert detect(HardwareOptions(), tmp_path).ram_bytes == 8 * GIB
    given = detect(
        HardwareOptions(gpus="1", gpu_memory_gib=10, gpu_bandwidth_gbs=100, gpu_tflops=5), tmp_path
    )
    assert given.gpu is not None
    assert (given.gpu.memory_bytes, given.gpu.bandwidth, given.gpu.flops) == (10 * GIB, 100e9, 5e12)
    assert given.origin["gpu"] == "given"


@pytest.mark.parametrize("gpus", ["1x4090", "2x4090"])
def test_a_plan_says_how_long_steps_are(
    gpus: str, capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    """The plan says so where experts are streamed, also of long prompts, thousands of tokens; else there are
    no such steps.
    """
    file = tmp_path / "plan.json"
    for share, chunk in (("0.5", "16384"), ("1", None)):
        arguments = ("--gpus", gpus, *HOST, "--gpu-experts-ratio", share, "--json", file)
        status, out, err = run_cli(capsys, "plan", model, *arguments)
        assert (status, err) == (0, "")
        assert json.loads(file.read_text())["settings"].get("prefill_chunk_max") == chunk
        assert (f"prefill_chunk_max {chunk}" in " ".join(out.split())) == (chunk is not None)
