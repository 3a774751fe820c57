"""Guards the plan of `moebius serve`: the same settings for all, shares by server, sockets that fit."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from app.bench import read_curve
from app.supervisor import core_division
from app.supervisor.expert_placement import NodeCores
from app.supervisor.health import GrpcProbe, HttpProbe, MailboxLiveness
from app.supervisor.placement import Gpu
from app.supervisor.plan import ServePlan, plan_processes
from app.supervisor.runfile import write_private
from moebius.checkpoint.errors import CheckpointError
from moebius.config import MoebiusConfig
from moebius.config.loader import load_config
from moebius.errors import ConfigError, StartupError, UserError
from tests.helpers.certificates import Authority, write_secret

MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "vocab_size": 11,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns a checkpoint directory with nothing but its config."""
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    return directory


def planned(model: Path, **flags: str) -> tuple[ServePlan, dict[str, MoebiusConfig]]:
    """The plan, and each process's configuration as it will read it."""
    state_dir = str(model.parent / "s")
    config = load_config(None, {"model": str(model), "port": "0", "state_dir": state_dir, **flags})
    serve_plan = plan_processes(config)
    serve_plan.plan.directory.mkdir(parents=True)
    configs = {}
    for path, text in serve_plan.plan.files:
        path.write_text(text)
        configs[path.stem] = load_config(path)
    return serve_plan, configs


def test_with_https_metrics_move_and_it_is_said(model: Path, tmp_path: Path) -> None:
    """Probes bring no certificate, so there is a plain port; where, is logged, unless it was chosen."""
    authority = Authority()
    write_secret(tmp_path / "tls", authority.issue("web"), authority.pem)
    certificate, key = str(tmp_path / "tls" / "tls.crt"), str(tmp_path / "tls" / "tls.key")
    with structlog.testing.capture_logs() as logs:
        _, configs = planned(model, expert_servers="1", http_cert_file=certificate, http_key_file=key)
    port = configs["gateway"].gateway.gateway_metrics_port
    assert port not in (0, configs["gateway"].gateway.port)
    assert [line["url"] for line in logs if "url" in line] == [f"http://127.0.0.1:{port}/metrics"]


def test_two_instances_on_a_gpu_divide_its_host(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first measures, and takes as many cores as read fast; the second has the others.

    Each expert server is restricted to its cores, and its settings say how many threads to start.
    """
    node = NodeCores(tuple(range(16)), tuple((cpu, cpu + 8) for cpu in range(8)))
    measured: list[int] = []

    def measure(nodes: object, most: int) -> dict[int, tuple[tuple[int, float], ...]]:
        measured.append(most)
        return {-1: ((4, 60e9), (5, 99e9), (8, 100e9))}

    monkeypatch.setattr(core_division, "usable_nodes", lambda: ({-1: node}, None))
    monkeypatch.setattr(core_division, "DIRECTORY", tmp_path / "cores")
    monkeypatch.setattr(read_curve, "measure_read_curves", measure)
    monkeypatch.setattr("app.supervisor.plan.find_gpus", lambda: (Gpu(-1),))
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, configs = planned(model, device="cuda")
    assert configs["expert-0"].experts.expert_threads == 5
    cpus = {spec.name: spec.cpus for spec in first.plan.processes}
    assert cpus == {"expert-0": (*range(5), *range(8, 13)), "gpu": (), "gateway": ()}
    second, configs = planned(model, device="cuda")
    assert configs["expert-0"].experts.expert_threads == 3
    assert str(second.servers[0]).startswith(f"3 (one for each physical core that {name_of(first)}")
    assert measured == [8]
    del first, second
    assert len(planned(model, device="cuda", expert_threads="7")[0].servers[0].cpus) == 14


def name_of(serve_plan: ServePlan) -> str:
    """Returns the name as other instances see it."""
    return f"port {serve_plan.config.gateway.port} "


def test_all_processes_agree(model: Path) -> None:
    """Model, mailbox, split and sockets are the same in every process; only the share differs."""
    serve_plan, configs = planned(model, expert_servers="2", expert_metrics_port="9400")
    assert set(configs) == {"gateway", "gpu", "expert-0", "expert-1"}
    assert len({config.model for config in configs.values()}) == 1
    assert configs["gateway"].gateway.engine_address == configs["gpu"].gpu.gpu_address
    assert len({config.experts.mailbox for config in configs.values()}) == 1
    assert configs["gpu"].experts.mailbox.startswith("moebius")
    for index in range(2):
        own = configs[f"expert-{index}"].experts
        assert (own.split_index, own.split_count) == (index, 2)
        assert own.expert_address == configs["gpu"].experts.expert_addresses[index]
        assert own.expert_metrics_port == 9400 + index
        assert own.expert_threads >= 1
    assert configs["gateway"].gateway.port > 0
    assert serve_plan.base_url.endswith(f":{configs['gateway'].gateway.port}")
    assert serve_plan.config.model.served_model_name == "my-model"


def test_commands_read_their_own_settings(model: Path) -> None:
    """Each process is started as `python -P -m moebius ROLE --config ITS.yaml`; experts stop last."""
    serve_plan, _ = planned(model, expert_servers="2", api_key="hunter2")
    commands = {spec.name: spec.command for spec in serve_plan.plan.processes}
    assert not any("hunter2" in word for command in commands.values() for word in command)  # `ps` shows them
    assert commands["expert-1"][:5] == (sys.executable, "-P", "-m", "moebius", "expert")
    assert commands["expert-1"][6].endswith("/expert-1.yaml")
    stages = {spec.name: spec.stop_stage for spec in serve_plan.plan.processes}
    assert stages["gateway"] < stages["gpu"] < stages["expert-0"] == stages["expert-1"]


def test_packed_experts_are_the_supervisors_unless_a_directory_is_given(model: Path, tmp_path: Path) -> None:
    """One file for each server, in the run directory, which all processes know; else in the user's."""
    serve_plan, configs = planned(model, expert_servers="2")
    directory = serve_plan.plan.directory
    assert {config.experts.expert_weights_dir for config in configs.values()} == {str(directory)}
    assert [file.path.name for file in serve_plan.plan.weights] == ["expert-0.weights", "expert-1.weights"]
    assert {file.path.parent for file in serve_plan.plan.weights} == {directory}
    shutil.rmtree(directory)
    serve_plan, configs = planned(model, expert_servers="2", expert_weights_dir=str(tmp_path / "w"))
    assert {config.experts.expert_weights_dir for config in configs.values()} == {str(tmp_path / "w")}
    assert serve_plan.plan.weights == ()
    shutil.rmtree(serve_plan.plan.directory)
    assert planned(model, expert_transport="local")[0].plan.weights == ()


def test_prefixes_in_ram_are_the_supervisors_unless_a_directory_is_given(model: Path, tmp_path: Path) -> None:
    """The engine knows the run directory; a user's directory, or a size of 0, needs no memory of it."""
    serve_plan, configs = planned(model, expert_transport="local", kv_offload_gib="1")
    directory = serve_plan.plan.directory
    assert configs["gpu"].gpu.kv_offload_dir == str(directory)
    assert [file.path for file in serve_plan.plan.prefixes] == [directory / "engine.kv"]
    shutil.rmtree(directory)
    for given in ({"kv_offload_dir": str(tmp_path / "kv"), "kv_offload_gib": "1"}, {}):
        serve_plan, configs = planned(model, expert_transport="local", **given)
        assert configs["gpu"].gpu.kv_offload_dir == given.get(
            "kv_offload_dir", str(serve_plan.plan.directory)
        )
        assert serve_plan.plan.prefixes == ()
        shutil.rmtree(serve_plan.plan.directory)


def test_local_transport_starts_no_expert(model: Path) -> None:
    """With the in-process reference there are two processes and no shared memory."""
    serve_plan, configs = planned(model, expert_transport="local")
    assert set(configs) == {"gateway", "gpu"}
    assert serve_plan.plan.segments == ()


def test_nothing_but_the_engine_where_all_experts_are_resident(model: Path) -> None:
    """No expert server, no shared memory; a placement that cannot be is refused before anything starts."""
    for everything in ({"gpu_experts_ratio": "1"}, {"gpu_layers": "0-1"}, {"gpu_experts": "8"}):
        serve_plan, configs = planned(model, **everything)
        assert set(configs) == {"gateway", "gpu"}
        assert serve_plan.plan.segments == ()
        shutil.rmtree(serve_plan.plan.directory)
    assert "expert-0" in planned(model, gpu_experts="7", expert_servers="1")[1]
    with pytest.raises(UserError, match="layer 2 does not exist"):
        planned(model, gpu_layers="2")


def test_grpc_transport_has_no_mailbox(model: Path) -> None:
    """Expert servers without a mailbox are reached by gRPC alone."""
    serve_plan, configs = planned(model, expert_transport="grpc", expert_servers="1")
    assert configs["gpu"].experts.mailbox == ""
    assert serve_plan.plan.segments == ()


def test_servers_elsewhere_are_used_as_given(model: Path) -> None:
    """Addresses of running expert servers: none is started, the split is theirs, and gRPC is required."""
    addresses = "far-1:50061,far-2:50061"
    _, configs = planned(model, expert_transport="grpc", expert_addresses=addresses)
    assert set(configs) == {"gateway", "gpu"}
    assert configs["gpu"].experts.expert_addresses == ("far-1:50061", "far-2:50061")
    assert configs["gpu"].experts.split_count == 2
    with pytest.raises(ConfigError, match="allowed with --expert-transport grpc only"):
        planned(model, expert_addresses=addresses)


def test_what_can_not_be_served_is_named(model: Path) -> None:
    """Wrong numbers of shares, long socket paths, taken ports and unknown models are refused at once."""
    with pytest.raises(ConfigError, match="3 shares for 2 expert servers"):
        planned(model, expert_servers="2", split_shares="1,1,1")
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        planned(model, state_dir="/tmp/" + "x" * 120)
    with pytest.raises(StartupError, match=r"cannot serve HTTP on 203\.0\.113\.1:0"):
        planned(model, host="203.0.113.1")
    with pytest.raises(CheckpointError, match="allowed: 1 to 8"):
        planned(model, experts_per_token="9")


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    """The kernel refuses any larger file, as on a full disk; Python ignores the signal that comes with it."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_short_shared_memory_is_one_sentence(model: Path) -> None:
    """All of it is taken when it is made, never on first touch; the error names place, need and remedy."""
    segment = planned(model, expert_servers="1")[0].plan.segments[0]
    message = r"share \d+ MiB of memory in /dev/shm, but .* needs \d+ bytes .* docker, podman: --shm-size"
    with files_no_larger_than(100_000), pytest.raises(StartupError, match=message):
        segment.create()
    assert not Path("/dev/shm", segment.name).exists()


def test_a_full_state_directory_is_one_sentence(tmp_path: Path) -> None:
    """What was written before stays whole; the error names directory and remedy."""
    write_private(tmp_path / "run.json", "former")
    with files_no_larger_than(10), pytest.raises(StartupError, match=rf"{tmp_path}: .* --state-dir"):
        write_private(tmp_path / "run.json", "x" * 100)
    assert (tmp_path / "run.json").read_text() == "former"
    assert (tmp_path / "run.json").stat().st_mode & 0o077 == 0


def test_signs_of_life_are_each_process_s_own(model: Path) -> None:
    """Counters of the mailbox, else answers; ranks other than the first have none."""
    found = {spec.name: spec.liveness for spec in planned(model, expert_servers="2")[0].plan.processes}
    for index in range(2):
        life = found[f"expert-{index}"]
        assert isinstance(life, MailboxLiveness)
        assert (life.index, life.grpc.address[-7:]) == (index, f"-{index}.sock")
    assert isinstance(found["gateway"], HttpProbe)
    assert found["gateway"].path == "/health"
    shutil.rmtree(model.parent / "s")
    flags = {"expert_transport": "grpc", "expert_servers": "1", "hang_timeout_s": "7"}
    ranks, _ = planned(model, **flags, tensor_parallel_size="2", device="cpu")
    found = {spec.name: spec.liveness for spec in ranks.plan.processes}
    assert isinstance(found["expert-0"], GrpcProbe)
    assert isinstance(found["gpu"], GrpcProbe)
    assert found["gpu-1"] is None
    assert ranks.timing.hang_timeout_s == 7
