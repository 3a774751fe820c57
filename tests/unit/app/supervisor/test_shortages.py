"""Guards what is said before anything starts: what `serve` refuses for its size, `doctor MODEL` does, too."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from app import cli
from app.doctor.facts import Volume, read_volume
from app.planning import fill, prefixes
from app.supervisor import shortages
from app.supervisor.shortages import Needs, find_shortages
from moebius.config import GpuConfig, MoebiusConfig, ParallelConfig
from moebius.kernels.weight_segment import segment_path
from moebius.process.limits import FEWEST_BYTES
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model
from tests.helpers.tiny_tokenizer import write_tokenizer
from tests.helpers.tiny_vision_models import word_tokenizer

MIB = 2**20
# A mailbox of some MiB.
SETTINGS = ("--num-pages", "64", "--mailbox-rows", "4096")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint that could be served."""
    directory = tmp_path_factory.mktemp("small") / "model"
    write_tiny_model(TINY_MODELS["qwen3_moe"], directory, seed=3)
    write_tokenizer(directory, word_tokenizer({}), None)
    return directory


def volume(path: Path, mib: float, kind: str = "tmpfs") -> Volume:
    nbytes = int(mib * MIB)
    return Volume(path, True, True, kind, nbytes, nbytes)


@dataclass(frozen=True)
class Case:
    """A host that is too small in one way."""

    # What doctor's line is about, and a part of both commands' sentence.
    check: str
    sentence: str
    spoil: Callable[[pytest.MonkeyPatch], None]


def small_shared_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shortages, "read_volume", lambda path: volume(path, 1))


def little_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shortages, "total_memory", lambda root: MIB)


def small_container(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shortages, "read_memory_limit", lambda root: 2 * MIB)


def little_address_space(patch: pytest.MonkeyPatch) -> None:
    limit = (FEWEST_BYTES["gpu"] + MIB, resource.RLIM_INFINITY)
    ask = resource.getrlimit
    patch.setattr(resource, "getrlimit", lambda which: limit if which == resource.RLIMIT_AS else ask(which))


CASES = {
    "shared memory": Case(
        "/dev/shm for this model",
        "MiB of memory in /dev/shm, but it holds 1 MiB, and 1 MiB are free",
        small_shared_memory,
    ),
    "RAM": Case("RAM for this model", "GiB of RAM, but this machine has 0.0 GiB", little_memory),
    "a container's RAM": Case(
        "RAM for this model", "GiB of RAM, but the cgroup (container, batch job) allows", small_container
    ),
    "address space": Case(
        "ulimit -v for this model", "may use 2817 MiB of address space", little_address_space
    ),
}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_doctor_says_that_a_model_can_be_served(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing fails here, and each kind of size was looked at."""
    assert run("doctor", model, *SETTINGS) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    for name in ("limits of a process", "shared memory, address space and RAM for this model", "memory plan"):
        assert any(line.startswith(f"ok      {name}: ") for line in lines), name


@pytest.mark.parametrize("name", CASES)
def test_both_commands_refuse_the_same(
    model: Path,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """doctor with status 1 and a line that says what helps, serve with one line, before it starts one."""
    case = CASES[name]
    case.spoil(monkeypatch)
    assert run("doctor", model, *SETTINGS) == 1
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("FAILURE")]
    assert line.startswith(f"FAILURE {case.check}: ")
    assert case.sentence in line
    problem, _, remedy = line.removeprefix(f"FAILURE {case.check}: ").partition("; ")
    state = tmp_path / "state"
    assert run("serve", model, *SETTINGS, "--port", 0, "--state-dir", state) == 2
    said = capsys.readouterr()
    # Threads that other tests have left may log meanwhile.
    own = [line for line in said.err.splitlines() if line.startswith("moebius")]
    assert own == [f"moebius: error: {problem}. {remedy}"]
    assert "starting" not in said.out
    assert not list(state.glob("serve-*"))


def test_what_lies_there_already_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of packed experts that a server takes over is as full as it has to be."""
    needs = Needs(0, (4 * MIB, 4 * MIB))
    monkeypatch.setattr(shortages, "read_volume", lambda path: volume(path, 5))
    (found,) = find_shortages(needs, str(tmp_path))
    assert found.of == "expert_weights_dir"
    assert "take 0.01 GiB more in" in found.problem
    Path(segment_path(str(tmp_path), 1)).write_bytes(bytes(4 * MIB))
    assert list(find_shortages(needs, str(tmp_path))) == []
    # On a disk they take no RAM.
    monkeypatch.setattr(shortages, "total_memory", lambda root: MIB)
    assert [one.of for one in find_shortages(needs, str(tmp_path))] == ["RAM"]
    monkeypatch.setattr(shortages, "read_volume", lambda path: volume(path, 5, "ext4"))
    assert list(find_shortages(needs, str(tmp_path))) == []


def test_prefixes_in_ram_are_counted_wherever_experts_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kv_offload_gib` beside packed experts that would do alone, and beside experts on a disk."""
    monkeypatch.setattr(shortages, "total_memory", lambda root: 8 * MIB)
    monkeypatch.setattr(shortages, "read_memory_limit", lambda root: None)
    assert list(find_shortages(Needs(0, (4 * MIB,)), "")) == []
    (found,) = find_shortages(Needs(0, (4 * MIB,), prefixes=5 * MIB), "")
    assert (found.of, "evicted prefixes" in found.problem) == ("RAM", True)
    assert "--kv-offload-gib" in found.remedy
    monkeypatch.setattr(shortages, "read_volume", lambda path: volume(path, 9, "ext4"))
    assert list(find_shortages(Needs(0, (4 * MIB,), prefixes=5 * MIB), str(tmp_path))) == []
    (found,) = find_shortages(Needs(0, (4 * MIB,), prefixes=9 * MIB), str(tmp_path))
    assert found.of == "RAM"


def test_a_directory_in_memory_is_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kv_disk_gib` counts as `kv_offload_gib` does where `kv_disk_dir`, made or not, lies in memory; ranks
    have equal parts of `kv_offload_gib`."""
    given = {"kv_disk_gib": 2.0, "kv_disk_dir": str(tmp_path / "made" / "later")}
    config = MoebiusConfig(gpu=GpuConfig(**given, kv_offload_gib=1.0))  # type: ignore[arg-type]
    for kind, gib in (("ext4", 1), ("tmpfs", 3)):
        monkeypatch.setattr(prefixes, "read_volume", lambda path, kind=kind: volume(path, 1, kind))
        assert prefixes.prefix_bytes(config) == gib * 2**30
    off = config.gpu.model_copy(update={"prefix_caching": False})
    assert prefixes.prefix_bytes(config.model_copy(update={"gpu": off})) == 0
    parallel = ParallelConfig(tensor_parallel_size=2)
    assert prefixes.prefix_bytes(MoebiusConfig(gpu=GpuConfig(kv_offload_gib=1.0), parallel=parallel)) == 2**29


def test_serve_refuses_prefixes_that_ram_has_no_room_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it starts a process; without prefix caching the setting takes none."""
    options = (*SETTINGS, "--kv-offload-gib", "1e5")
    assert run("serve", model, *options, "--port", 0, "--state-dir", tmp_path / "state") == 2
    assert "100000.0 GiB of evicted prefixes and mailbox take" in capsys.readouterr().err
    assert run("doctor", model, *options) == 1
    assert "FAILURE RAM for this model" in capsys.readouterr().out
    run("doctor", model, *options, "--no-prefix-caching")
    assert "FAILURE RAM for this model" not in capsys.readouterr().out


def test_limits_of_the_process_are_checked_without_a_model() -> None:
    """`ulimit -v` below what a process without a model needs: doctor ends with status 1, in serve's words."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)); "
        "from app import cli; cli.main(['doctor'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert (
        "FAILURE limits of a process: ulimit -v: a process may use 2048 MiB of address space" in ended.stdout
    )


def test_a_real_dev_shm_of_1_mib(model: Path, tmp_path: Path) -> None:
    """A mount of 1 MiB, as in a container that was given no more, is reported."""
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    alone = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if os.geteuid() or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs root and a mount namespace of its own")
    assert read_volume(Path("/dev/shm")).total_bytes > MIB
    moebius = [*alone, sys.executable, "-m", "moebius"]
    for command, status in ((["doctor", str(model)], 1), (["serve", str(model), "--port", "0"], 2)):
        if command[0] == "serve":
            command += ["--state-dir", str(tmp_path / "s")]
        ended = subprocess.run([*moebius, *command, *SETTINGS], capture_output=True, text=True, timeout=240)
        assert ended.returncode == status, ended.stdout + ended.stderr
        assert "but it holds 1 MiB, and 1 MiB are free" in ended.stdout + ended.stderr


def test_what_serve_puts_on_gpus_by_itself_needs_no_ram(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Doctor judges the placement that `serve` would choose: with all on a GPU no server packs any."""

    def on_gpu(config: MoebiusConfig) -> MoebiusConfig:
        placement = config.placement.model_copy(update={"gpu_experts_ratio": 1.0})
        return config.model_copy(update={"placement": placement})

    little_memory(monkeypatch)
    assert run("doctor", model, *SETTINGS) == 1
    assert "FAILURE RAM for this model" in capsys.readouterr().out
    monkeypatch.setattr(fill, "with_filled_gpus", on_gpu)
    run("doctor", model, *SETTINGS)
    assert "FAILURE RAM for this model" not in capsys.readouterr().out
